"""The two kinds of failure that reach a person: a model that cannot be loaded, a request that cannot be served."""

from __future__ import annotations


class ModelError(Exception):
    """The model or its files cannot be used; the message is one sentence for the operator."""


class RequestError(Exception):
    """A request the engine refuses; becomes an HTTP error in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param
