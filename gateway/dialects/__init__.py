"""The APIs the gateway understands, one module each; everything else under ``/v1`` is passed through untouched."""

from gateway.dialects.base import Dialect
from gateway.dialects.chat import ChatCompletions
from gateway.dialects.completions import Completions
from gateway.dialects.count_tokens import CountTokens
from gateway.dialects.embeddings import Embeddings
from gateway.dialects.messages import Messages
from gateway.dialects.responses import Responses

_ALL: tuple[Dialect, ...] = (
    ChatCompletions(),
    Completions(),
    Responses(),
    Messages(),
    CountTokens(),
    Embeddings(),
)
DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in _ALL}
"""By path."""

__all__ = ["DIALECTS", "Dialect"]
