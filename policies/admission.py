"""Which answers are worth keeping: those whose question has been asked before (TinyLFU's doorkeeper, G. Einziger et
al., 2017).

Counts are approximate, as in a count-min sketch (G. Cormode, S. Muthukrishnan, 2005): never too low since the last
ageing, rarely too high, in a fixed amount of memory.
"""

from __future__ import annotations

_ROWS = 4
_MOST = 255


class Sightings:
    """How often each key has been seen lately. Keys are hashes of at least 16 bytes, of which it uses the bits as they
    are. ``width``: counters in a row, a power of two; after ten sightings per counter all counts are halved.
    """

    def __init__(self, width: int = 1 << 16) -> None:
        if width < 1 or width & (width - 1):
            raise ValueError(f"width must be a power of two, got {width}")
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]
        self._ages_after = 10 * width
        self._seen = 0

    def add(self, key: bytes) -> int:
        """Counts a sighting; returns how often the key has been seen with it, at most 255."""
        self._seen += 1
        if self._seen >= self._ages_after:
            self._age()
        places = self._places(key)
        seen = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if seen == _MOST:
            return seen
        for row, place in zip(self._rows, places, strict=True):
            if row[place] == seen:  # conservative update: only the smallest counters can be right
                row[place] += 1
        return seen + 1

    def count(self, key: bytes) -> int:
        """How often the key has been seen."""
        return min(row[place] for row, place in zip(self._rows, self._places(key), strict=True))

    def _places(self, key: bytes) -> list[int]:
        return [int.from_bytes(key[4 * i : 4 * i + 4], "little") & self._mask for i in range(_ROWS)]

    def _age(self) -> None:
        self._seen //= 2
        halved = bytes(count // 2 for count in range(256))
        self._rows = [row.translate(halved) for row in self._rows]
