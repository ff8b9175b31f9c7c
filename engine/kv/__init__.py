"""Paged key/value memory: the tensors (`pool`) and who holds which block (`manager`)."""
