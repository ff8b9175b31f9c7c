"""Bytes in, bytes out: memory, disk and Redis, each bounded, each behind a breaker."""
