"""Where a Redis is and how to get in, read from a URL."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class Address:
    """Where a Redis is: `redis://[user:password@]host[:port][/db]`, `rediss://…` (TLS), `unix:///path[?db=N]`.

    TLS takes `?ca=FILE` (else the system's), `&cert=FILE&key=FILE`, `&verify=no`.
    """

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Address:
        """ValueError says what is wrong with `url`, without its password."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"a Redis address begins with redis://, rediss:// or unix://, not {parts.scheme!r}")
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        unix = parts.scheme == "unix"
        db = query.get("db") or ("" if unix else parts.path.strip("/")) or "0"
        if not db.isdecimal():
            raise ValueError(f"the database of a Redis address must be a number, not {db!r}")
        if unix and not parts.path:
            raise ValueError("a unix:// address needs the path of a socket")
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or 6379,
            path=unquote(parts.path) if unix else None,
            db=int(db),
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            tls=_tls(query) if parts.scheme == "rediss" else None,
        )

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def _tls(query: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=query.get("ca"))
        if "cert" in query:
            context.load_cert_chain(query["cert"], query.get("key"))
    except OSError as error:
        raise ValueError(f"cannot read the certificates of a Redis address: {error}") from error
    if query.get("verify") == "no":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
