"""The APIs the gateway understands, one module each; everything else under ``/v1`` is passed through untouched."""

from gateway.dialects.base import Dialect
from gateway.dialects.chat import ChatCompletions
from gateway.dialects.completions import Completions

DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in (ChatCompletions(), Completions())}
"""By path."""

__all__ = ["DIALECTS", "Dialect"]
