"""Sentinels: canaries that show, every 45 seconds, whether each layer does what it is there for; `docs/sentinels.md`
says what each light means. Silent failure is the commonest complaint about caches: one that never hits, events that
never arrive, a tenant that sees what is another's.
"""

from gateway.sentinels.lights import Board, Light

__all__ = ["Board", "Light"]
