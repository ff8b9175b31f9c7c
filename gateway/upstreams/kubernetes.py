"""The endpoints of a Kubernetes service, listed and then watched (EndpointSlice, discovery.k8s.io/v1).

From inside the cluster the API server and the credentials are where every pod has them. Whatever fails is tried again
after a while, beginning with a new list, and until then what was known is believed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from pydantic import BaseModel, Field, ValidationError

from gateway.config import Kubernetes
from gateway.http import Headers
from gateway.upstreams.client import Origin, Timeouts, UpstreamClient, UpstreamError, UpstreamResponse

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 300
"""After which the server ends a watch, and another begins where it ended."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
_MAX_LIST = 32 * 1024 * 1024
_MAX_LINE = 4 * 1024 * 1024

Found = Callable[[Sequence[tuple[str, int]]], None]
"""Takes the hosts and ports of all endpoints that are ready."""


class Unusable(Exception):
    """The API server says something else than it should; the message says what."""


class _Metadata(BaseModel):
    name: str = ""
    version: str = Field("", alias="resourceVersion")


class _Port(BaseModel):
    name: str | None = None
    port: int | None = None


class _Conditions(BaseModel):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(BaseModel):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()


class _Slice(BaseModel):
    metadata: _Metadata
    ports: list[_Port] | None = None
    endpoints: list[_Endpoint] | None = None

    def ready(self, port_name: str | None) -> Iterator[tuple[str, int]]:
        """The endpoints that may be sent requests."""
        ports = (one for one in self.ports or () if port_name in (None, one.name, str(one.port)))
        port = next((one.port for one in ports if one.port), 0)
        for endpoint in (self.endpoints or ()) if port else ():
            if endpoint.conditions.ready is not False and not endpoint.conditions.terminating:
                yield from ((address, port) for address in endpoint.addresses)


class _List(BaseModel):
    metadata: _Metadata
    items: list[_Slice] | None = None


class _Event(BaseModel):
    type: str
    object: dict[str, Any]


class Endpoints:
    """Those of one service. ``account``: a folder with ``token``, ``ca.crt`` and ``namespace``, as far as needed."""

    def __init__(self, service: Kubernetes, account: Path = SERVICE_ACCOUNT) -> None:
        self._service, self._account = service, account
        self._slices: dict[str, _Slice] = {}
        self._version = ""

    async def follow(self, found: Found) -> None:
        """Tells of the endpoints, and again whenever they change."""
        pause = FIRST_PAUSE
        client = UpstreamClient(self._trusted())
        try:
            while True:
                try:
                    if not self._version:
                        await self._list(client)
                        found(self._places())
                    async for _ in self._watch(client):
                        found(self._places())
                        pause = FIRST_PAUSE
                except (UpstreamError, Unusable, ValidationError, OSError) as error:
                    log.warning("kubernetes service %s: %s", self._service.service, error)
                    self._version = ""
                    await asyncio.sleep(pause)
                    pause = min(LONGEST_PAUSE, pause * 2)
        finally:
            await client.close()

    async def _list(self, client: UpstreamClient) -> None:
        response = await self._ask(client, {})
        listed = _List.model_validate_json(await response.read(_MAX_LIST))
        self._slices = {item.metadata.name: item for item in listed.items or ()}
        self._version = listed.metadata.version

    async def _watch(self, client: UpstreamClient) -> AsyncIterator[None]:
        """One item for each change, until the server ends the watch."""
        wish = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": self._version}
        response = await self._ask(client, {**wish, "timeoutSeconds": str(WATCH_SECONDS)})
        rest = b""
        async for data in response.chunks():
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE:
                raise Unusable("a line of the watch is too long")
            for line in filter(None, lines):
                if self._changed(_Event.model_validate_json(line)):
                    yield

    def _changed(self, event: _Event) -> bool:
        if event.type == "ERROR":
            raise Unusable(f"the watch has failed: {event.object.get('message')}")
        item = _Slice.model_validate(event.object)
        self._version = item.metadata.version or self._version
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[item.metadata.name] = item
        elif event.type == "DELETED":
            self._slices.pop(item.metadata.name, None)
        return event.type != "BOOKMARK"

    def _places(self) -> list[tuple[str, int]]:
        return [place for item in self._slices.values() for place in item.ready(self._service.port)]

    async def _ask(self, client: UpstreamClient, query: Mapping[str, str]) -> UpstreamResponse:
        url = urlsplit(self._service.api or _api_server())
        origin = Origin(url.scheme, url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
        space = self._service.namespace or self._read("namespace") or "default"
        label = {"labelSelector": f"kubernetes.io/service-name={self._service.service}"}
        path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(space)}/endpointslices?{urlencode({**label, **query})}"
        headers: Headers = [(b"accept", b"application/json")]
        if token := self._read("token"):  # anew each time: it is renewed in its file
            headers.append((b"authorization", b"Bearer " + token.encode()))
        timeouts = Timeouts(first_byte=30.0, idle=WATCH_SECONDS + 30.0, total=WATCH_SECONDS + 60.0)
        response = await client.send(origin, "GET", url.path.encode() + path.encode(), headers, b"", timeouts)
        if response.status != 200:
            response.close()
            raise Unusable(f"the API server answers with status {response.status}")
        return response

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text().strip()
        except OSError:
            return ""

    def _trusted(self) -> ssl.SSLContext | None:
        authority = self._account / "ca.crt"
        return ssl.create_default_context(cafile=authority) if authority.is_file() else None


def _api_server() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise Unusable("this is no pod of a cluster: say where the API server is (kubernetes.api)")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"
