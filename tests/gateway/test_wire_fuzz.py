"""Some hundred random conversations with the short path and the full path; `fuzz_wire` holds as many as one likes."""

from __future__ import annotations

import hypothesis

from tests.gateway.fuzz_wire import conversations, fuzzing


def test_random_conversations_come_out_the_same() -> None:
    with fuzzing() as fuzz:

        @hypothesis.settings(
            max_examples=200,
            derandomize=True,
            database=None,
            phases=[hypothesis.Phase.generate],  # a difference takes long to see, and minutes to make smaller
        )
        @hypothesis.given(conversations())
        def hold(pieces: list[bytes]) -> None:
            fuzz.converse(pieces)

        hold()
        fuzz.at_rest()
        assert fuzz.short > 30
        assert fuzz.statuses[400] > 20
        assert fuzz.statuses[401] > 5
