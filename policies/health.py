"""Whether an upstream may be sent requests: ejected when it fails again and again, and brought back by degrees."""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 3
"""Failures in a row that eject it."""
FIRST_BREAK, LONGEST_BREAK = 2.0, 60.0
"""Seconds for which it is first left alone, and at most; each relapse doubles it."""
RETURN = 30.0
"""Seconds in which its share grows back from `FIRST_SHARE` to the whole."""
FIRST_SHARE = 0.1


@dataclass(slots=True, eq=False)
class Health:
    """The health of one upstream, by a clock that the caller brings (seconds that never go back)."""

    ejections: int = 0
    _in_a_row: int = 0
    _relapses: int = 0
    _until: float = 0.0  # ejected till then, and then till it has answered
    _ejected: bool = False
    _rests_until: float = 0.0
    _returned_at: float = -RETURN

    def succeeded(self, now: float) -> None:
        """It answered (a request or a probe)."""
        self._in_a_row = 0
        if self._ejected and now >= self._until:
            self._ejected, self._returned_at = False, now
        elif not self._ejected and now - self._returned_at > LONGEST_BREAK:
            self._relapses = 0

    def failed(self, now: float) -> bool:
        """It did not (no connection, no answer, an answer that says it cannot); whether that ejects it."""
        self._in_a_row += 1
        if self._ejected:
            if now >= self._until:
                self._eject(now)
            return False
        if self._in_a_row < (FAILURES if now - self._returned_at >= RETURN else 1):
            return False
        self.ejections += 1
        self._eject(now)
        return True

    def rest(self, now: float, seconds: float) -> None:
        """It asks to be left alone for a while."""
        self._rests_until = max(self._rests_until, now + min(seconds, LONGEST_BREAK))

    def available(self, now: float) -> bool:
        """Whether requests may go there. After its break it may be tried again."""
        return now >= self._rests_until and (not self._ejected or now >= self._until)

    @property
    def ejected(self) -> bool:
        """Whether it has yet to show that it is back."""
        return self._ejected

    def share(self, now: float) -> float:
        """Its share of the traffic it had before, above 0 to 1."""
        if self._ejected:
            return FIRST_SHARE
        back = (now - self._returned_at) / RETURN
        return FIRST_SHARE + (1 - FIRST_SHARE) * max(0.0, back) if back < 1 else 1.0

    def _eject(self, now: float) -> None:
        self._ejected, self._in_a_row = True, 0
        self._until = now + min(LONGEST_BREAK, FIRST_BREAK * 2.0**self._relapses)
        self._relapses = min(self._relapses + 1, 10)
