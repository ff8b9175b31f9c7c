"""`warmgate lint`: prefix health of a file of requests, without a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache.response.canonical import BadBody, parse
from gateway.prefix_health import PrefixHealth, report
from gateway.remote import Problem


def lint_file(path: Path) -> dict[str, Any]:
    """The report of `gateway.prefix_health` on a file of JSON lines: request bodies, or lines of OpenAI's batch format
    with a ``body``. Raises `Problem` with the line that cannot be read.
    """
    health = PrefixHealth(lambda: 0.0, look_every=0.0)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    body = _body(line, f"{path}, line {number}")
                    health.request("", str(body.get("model", "")), body, 0.0)
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror}") from None
    if not health.requests:
        raise Problem(f"{path} holds no requests")
    return report([health.told()])


def findings_text(found: dict[str, Any]) -> str:
    """A report for people."""
    return "\n".join(_lines(found))


def _body(line: bytes, where: str) -> dict[str, Any]:
    try:
        body = parse(line)
    except BadBody as error:
        raise Problem(f"{where}: {error}") from None
    inner = body.get("body")
    return inner if isinstance(inner, dict) else body


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for group in found["prompts"]:
        yield (
            f"{group['model'] or 'no model'}: {group['looked_at']} requests of about {group['tokens']:,} prompt "
            f"tokens, of which {group['shared']:.0%} are shared with a request before"
        )
    for finding in found["findings"]:
        yield ""
        yield (
            f"{finding['kind']} in {finding['path']}, character {finding['offset']} ({finding['model']}), seen "
            f"{finding['seen']} times: {finding['lost']:,} tokens behind it could not be shared"
        )
        yield f"  {finding['mend']}"
    yield ""
    count = len(found["findings"])
    yield "Nothing to mend." if not count else f"{count} {'fault' if count == 1 else 'faults'} to mend."
