"""Guessing the next tokens: where guesses come from (`lookup`), which are worth it (`drafter`), and how they can be
verified without changing a bit (`exact`)."""
