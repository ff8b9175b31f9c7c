"""One thread for all engine tests: tiny products are slower on several, and the machine is shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from tests.engine import tiny
from tests.engine.split import LOCAL, Engine, at_rest
from tests.waiting import wait_until

torch.set_num_threads(1)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Makes engines that can share prompts; in the end each must have all its blocks back."""
    made: list[EngineCore] = []

    def make(**changes: Any) -> EngineCore:
        core = tiny.core(**{"kv_transfer": LOCAL, "kv_transfer_lease": 5.0, **changes})
        made.append(core)
        return core

    yield make
    for core in made:
        assert core.link is not None
        wait_until(lambda core=core: at_rest(core))
        core.close()
