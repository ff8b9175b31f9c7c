"""What the command line asks of a running gateway, over HTTP as anyone would."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from gateway.config import load_config
from gateway.supervisor.greeting import address

KEY_VARIABLE = "WARMGATE_ADMIN_KEY"


class Problem(Exception):
    """Something the user must change: one sentence."""


def base_url(given: str | None, config: Path | None) -> str:
    """The gateway's address: as given, else where the configuration has it listen; raises `Problem`, ConfigError."""
    if given is not None:
        return given.rstrip("/")
    env = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    listen = load_config(config, env, {}).listen
    if listen.port == 0:
        raise Problem("the configuration leaves the port open; name the gateway with --url")
    return address(listen.host, listen.port)


def ask(url: str, key: str | None, body: dict[str, Any] | None = None) -> Any:
    """The gateway's JSON answer to a GET, or to a POST of ``body``; raises `Problem`."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers)
        with opener.open(request, timeout=30) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise Problem(f"the gateway refused: {_reason(error)}") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise Problem(f"no gateway answers at {url}: {reason}; name the right one with --url") from None
    except ValueError:
        raise Problem(f"{url} is not the address of a gateway") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        body = json.load(error)
        return body["detail"] if "detail" in body else body["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
