"""Upstreams: whatever speaks a dialect over HTTP, and how the gateway reaches it."""
