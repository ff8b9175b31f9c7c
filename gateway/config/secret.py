"""References to secrets: the configuration says where a secret is, never what it is.

``env:NAME`` and ``file:PATH`` are read when the secret is needed; ``sha256:HEX`` holds the digest of a key that
callers present, so that the key itself need not be on this machine at all.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ENV = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)", re.ASCII)
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})", re.ASCII)


class SecretError(Exception):
    """A secret could not be read; the message is one sentence and never holds the secret."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Where a secret is. ``str()`` gives the reference back; the secret itself is never shown nor kept."""

    reference: str

    def __str__(self) -> str:
        return self.reference

    @property
    def hashed(self) -> bool:
        return self.reference.startswith("sha256:")

    def resolve(self, env: Mapping[str, str] | None = None) -> str:
        """The secret's text. Raises SecretError when it is missing, empty, unreadable or only known by its hash."""
        scheme, _, where = self.reference.partition(":")
        if scheme == "env":
            value = (os.environ if env is None else env).get(where)
            if not value:
                state = "is empty" if value == "" else "is not set"
                raise SecretError(f"the environment variable {where} {state}")
            return value
        if scheme == "file":
            try:
                value = Path(where).read_text(encoding="utf-8").rstrip("\r\n")
            except OSError as error:
                raise SecretError(f"the secret file {where} cannot be read: {error.strerror}") from None
            except UnicodeDecodeError:
                raise SecretError(f"the secret file {where} is not UTF-8 text") from None
            if not value:
                raise SecretError(f"the secret file {where} is empty")
            return value
        raise SecretError("only the hash of this secret is known")

    def digest(self, env: Mapping[str, str] | None = None) -> bytes:
        """SHA-256 of the secret (32 bytes): what presented keys are looked up by."""
        if self.hashed:
            return bytes.fromhex(self.reference.removeprefix("sha256:"))
        return hashlib.sha256(self.resolve(env).encode()).digest()

    def matches(self, presented: str, env: Mapping[str, str] | None = None) -> bool:
        """Whether ``presented`` is this secret, compared in constant time."""
        return hmac.compare_digest(self.digest(env), hashlib.sha256(presented.encode()).digest())


def parse_secret(value: object, *, base: Path, hash_allowed: bool) -> Secret:
    """A reference from its text; ``file:`` paths are taken from ``base``. Raises ValueError without the value."""
    if isinstance(value, Secret):
        return value
    forms = "env:NAME, file:PATH or sha256:HEX" if hash_allowed else "env:NAME or file:PATH"
    if isinstance(value, str):
        if _ENV.fullmatch(value) or (hash_allowed and _SHA256.fullmatch(value)):
            return Secret(value)
        if value.startswith("file:") and value != "file:":
            return Secret(f"file:{base / Path(value.removeprefix('file:')).expanduser()}")
    raise ValueError(f"must say where the secret is ({forms}), not the secret itself")
