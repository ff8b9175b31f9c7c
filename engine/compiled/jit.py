"""How functions are compiled, and what they take.

Arrays of "stored" numbers are float32, or bfloat16 as uint16; all is computed in float32. No function lets the compiler
reorder a sum, so a row's bits do not depend on the other rows, nor on what a function was compiled into.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import config as numba_config
from numba import njit
from numba.core.caching import FunctionCache

log = logging.getLogger("engine")

Array = Any
"""A NumPy array; Numba compiles functions for the dtypes that they are called with."""

ZERO, ONE = np.float32(0), np.float32(1)


def code_folder(sources: Path) -> Path | None:
    """Where machine code of a folder's sources as they are is kept for the next start; None if nowhere can be written.

    Numba asks whether a function's own file has changed, but what it calls, and what is compiled into it, is in others.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources.glob("*.py")))).hexdigest()[:16]
    for root in (sources / "__pycache__", Path("~/.cache/warmgate")):
        with contextlib.suppress(OSError, RuntimeError):  # there may be no home
            folder = root.expanduser() / f"compiled-{digest}"
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return None


_FOLDER = code_folder(Path(__file__).parent)
_CONFIG: Any = numba_config


class KeptCode(FunctionCache):
    """Machine code in files. Those that are damaged (power was lost) or cannot be written are as good as none."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged pickle can raise anything
            log.warning("kept machine code could not be read; it is compiled again")
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("machine code cannot be kept for the next start: %s", error.strerror)


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles when first called, or takes what is kept. Runs without the GIL; division by zero gives infinity."""
    dispatcher: Any = njit(nogil=True, error_model="numpy")(function)
    if _FOLDER is not None:
        usual, _CONFIG.CACHE_DIR = _CONFIG.CACHE_DIR, str(_FOLDER)
        try:
            dispatcher._cache = KeptCode(function)
        finally:
            _CONFIG.CACHE_DIR = usual
    return dispatcher
