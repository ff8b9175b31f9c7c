"""Lines as a Parquet file, by arro3 (the extra ``parquet``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gateway.ledger.report import Line

TYPE = "application/vnd.apache.parquet"


def is_installed() -> bool:
    """Whether such files can be written here."""
    return find_spec("arro3") is not None and find_spec("arro3.io") is not None


def as_parquet(lines: Sequence[Line], like: Line) -> bytes:
    """One column for each of ``like``, whose values show the types (None: a float); null where unknown."""
    core: Any = import_module("arro3.core")
    types = {bool: core.DataType.bool(), int: core.DataType.int64(), str: core.DataType.utf8()}
    real = core.DataType.float64()
    columns = [
        core.Array([line[name] for line in lines], type=types.get(type(value), real)) for name, value in like.items()
    ]
    out = io.BytesIO()
    import_module("arro3.io").write_parquet(core.Table.from_arrays(columns, names=list(like)), out)
    return out.getvalue()
