"""Values on their way out over HTTP: as JSON, as events of a stream, and errors in OpenAI's form as either."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response

from engine.errors import RequestError


def as_json(value: Any, status: int = 200) -> Response:
    """A plain response."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def as_event(value: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def refusal(error: RequestError) -> Response:
    """The plain response to a request that is not served."""
    response = as_json(error_body(error), error.status)
    if error.status == 503:
        response.headers["retry-after"] = "2"
    return response
