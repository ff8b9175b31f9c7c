"""Field cases, section E: tenants never share, admission comes before every answer, and the store is not trusted."""

from __future__ import annotations

import asyncio
import io
import pickle
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from cache.stores.redis import RedisStore
from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import B, Bench, World, both_paths, hashed, one_world
from tests.field.reading import ASKS
from tests.harness import upstream
from tests.services import RedisServer

EMBEDDINGS = ("/v1/embeddings", {"model": "m1", "input": ["a", "b"]})
EVERY_API = {**ASKS, "embeddings": EMBEDDINGS}
TENANTS: list[dict[str, Any]] = [
    {"name": "t1", "keys": [hashed("K1"), hashed("K1-too"), {"key": hashed("K1-narrow"), "models": ["m2"]}]},
    {"name": "t2", "keys": [hashed("K2")]},
]


@pytest.fixture
async def two(world: World) -> AsyncIterator[Bench]:
    """A bench with tenants T1 (keys K1 and K1-too; K1-narrow may use m2 only) and T2 (key K2)."""
    async with world.bench(tenants=TENANTS) as bench:
        yield bench


@pytest.mark.parametrize("api", EVERY_API)
async def test_o36_a_tenant_never_gets_another_tenants_answer(two: Bench, api: str) -> None:
    path, ask = EVERY_API[api]
    await two.miss(ask, path, key="K1")
    await two.hit(ask, path, key="K1-too")
    for stream in (False, True) if api != "embeddings" else (False,):
        reply = await two.send({**ask, "stream": stream}, path, key="K2")
        assert reply.rose == (0 if stream else 1), "only its own answer, of a moment ago"
    await two.hit(ask, path, key="K1")
    assert two.u.n == 2


@both_paths
async def test_o36_tenants_do_not_join_each_others_flights(two: Bench, gate: asyncio.Event) -> None:
    two.u.always(answer().held(gate))

    async def ask(key: str) -> str:
        response = await two.gateway.client.post(
            "/v1/chat/completions", json=B, headers={"authorization": f"Bearer {key}"}
        )
        return response.json()["choices"][0]["message"]["content"]

    keys = ["K1", "K2"] * 50
    asking = asyncio.gather(*map(ask, keys))
    await two.gateway.joined(50, 50)
    gate.set()
    texts = await asking
    assert two.u.n == 2
    assert len({*texts[::2]}) == len({*texts[1::2]}) == 1
    assert texts[0] != texts[1]


FEIGNED: list[dict[str, Any]] = [
    {"user": "t1"},
    {"metadata": {"tenant": "t1"}},
    {"namespace": "t1"},
    {"tenant": "t1"},
    {"cache_salt": "t1"},
    {"prompt_cache_key": "t1"},
    {"safety_identifier": "t1"},
    {"cache": {"namespace": "t1", "tenant": "t1"}},
    {"extra_body": {"tenant": "t1"}},
]


@both_paths
async def test_o36_no_field_and_no_header_of_a_request_chooses_another_tenants_space(two: Bench) -> None:
    await two.miss(B, key="K1")
    for field in FEIGNED:
        with_field = B | field
        await two.send(with_field, key="K1")
        reply = await two.send(with_field, key="K2")
        assert reply.text != "ans-1"
    t1 = {(await two.send(B | field, key="K1")).text for field in FEIGNED}
    t2 = {(await two.send(B | field, key="K2")).text for field in FEIGNED}
    assert not t1 & t2
    headers = {"x_warmgate_tenant": "t1", "x_tenant": "t1", "openai_organization": "t1", "x_warmgate_tags": "t1"}
    for name, value in headers.items():
        assert (await two.send(B, key="K2", **{name: value})).text not in t1
    for namespace in ("t1", "t1/", "default", "/t1"):
        reply = await two.send(B, key="K2", x_warmgate_namespace=namespace)
        assert reply.status == 400 or reply.text not in t1


@one_world
async def test_o36_namespaces_of_one_name_belong_each_to_their_tenant(two: Bench) -> None:
    for key in ("K1", "K2"):
        await two.miss(B, key=key, x_warmgate_namespace="shared")
        await two.miss(B, key=key)
    purged = await two.gateway.client.post("/admin/purge", json={"namespace": "shared", "tenant": "t2"})
    assert purged.status_code == 200
    await two.hit(B, key="K1", x_warmgate_namespace="shared")
    await two.hit(B, key="K2")
    await two.miss(B, key="K2", x_warmgate_namespace="shared")


@pytest.mark.parametrize("world", ["redis-wire"], indirect=True)
async def test_o36_redis_keys_show_neither_prompts_nor_api_keys(two: Bench, redis_process: RedisServer) -> None:
    for path, ask in EVERY_API.values():
        await two.miss(ask, path, key="K1", x_warmgate_namespace="spacious", x_warmgate_tags="tagged")
    with redis_process.client() as client:
        names = b"\n".join(client.scan_iter())
    assert two.u.n >= len(EVERY_API)
    for secret in (b"K1", b"Say A", b"t1", b"spacious", b"tagged", b"m1", hashed("K1").encode()[7:]):
        assert secret not in names


async def test_o38_admission_comes_before_every_answer(two: Bench) -> None:
    await two.miss(B, key="K1")
    await two.hit(B, key="K1")
    for key, status, code in (
        ("K1-narrow", 403, "model_not_allowed"),
        (None, 401, "missing_api_key"),
        ("wrong", 401, "invalid_api_key"),
        (hashed("K1"), 401, "invalid_api_key"),
        ("k1", 401, "invalid_api_key"),
    ):
        reply = await two.send(B, key=key)
        assert (reply.status, reply.response.json()["error"]["code"], reply.rose) == (status, code, 0)
        assert "ans-" not in reply.response.text
    await two.hit(B, key="K1-too")
    without_k1 = [{**TENANTS[0], "keys": [hashed("K1-too")]}, TENANTS[1]]
    await two.reload(tenants=without_k1)
    revoked = await two.send(B, key="K1")
    assert (revoked.status, revoked.rose) == (401, 0)
    await two.hit(B, key="K1-too")
    limited = [{**without_k1[0], "limits": {"requests_per_minute": 2}}, TENANTS[1]]
    await two.reload(tenants=limited)
    for _ in range(2):
        await two.hit(B, key="K1-too")
    over = await two.send(B, key="K1-too")
    assert (over.status, over.rose) == (429, 0)
    assert int(over.response.headers["retry-after"]) > 0
    two.clock.advance(60)
    if two.gateway.app.runtime.shared is not None and isinstance(two.gateway.app.runtime.shared.store, RedisStore):
        store = two.gateway.app.runtime.shared.store  # it counts by its own clock
        await store.client.execute(b"DEL", store.quotas._prefix + b"t1")
    await two.hit(B, key="K1-too")
    assert await two.outcomes() == {"miss": 1, "exact": 6, "error": 7}
    hits = [row for row in await two.rows() if row["outcome"] == "exact"]
    assert [(row["tenant"], row["prompt_tokens"], row["output_tokens"]) for row in hits] == [("t1", 10, 5)] * 6


@both_paths
@pytest.mark.parametrize(
    ("limits", "spend"),
    [({"requests_per_minute": 1}, 1), ({"tokens_per_minute": 14}, 1)],
    ids=["requests", "tokens"],
)
@pytest.mark.parametrize("api", ASKS)
async def test_o38_a_hit_counts_against_the_limits_and_is_refused_in_the_apis_own_form(
    world: World, api: str, limits: dict[str, int], spend: int
) -> None:
    path, ask = ASKS[api]
    async with world.bench(tenants=TENANTS) as bench:
        await bench.miss(ask, path, key="K1")
        await bench.reload(tenants=[{**TENANTS[0], "limits": limits}, TENANTS[1]])
        for _ in range(spend):
            await bench.hit(ask, path, key="K1")
        refused = await bench.send(ask, path, key="K1-too")
        assert (refused.status, refused.rose) == (429, 0)
        assert refused.response.json()["error"]["type"] == "rate_limit_error"
        assert (refused.response.json().get("type") == "error") == (api == "messages")
        await bench.miss(ask, path, key="K2")


@both_paths
async def test_o38_callers_under_way_are_bounded_whether_they_hit_or_not(world: World) -> None:
    tenants = [{**TENANTS[0], "limits": {"concurrent": 1}}, TENANTS[1]]
    async with world.bench(tenants=tenants) as bench:
        await bench.miss(B, key="K1")
        bench.u.reply(answer(deltas=["a "] * 20).paced(0.05))
        async with bench.streaming(B | {"stream": True, "seed": 1}, key="K1") as response:
            pieces = response.aiter_raw()
            await anext(pieces)
            assert (await bench.send(B, key="K1-too")).status == 429
            await bench.miss(B, key="K2")
        await bench.at_rest()
        await bench.hit(B, key="K1-too")


PRIVATE = {
    "set-cookie": "session=private; Path=/",
    "x-request-id": "private-request",
    "request-id": "private-request",
    "x-ratelimit-remaining-requests": "private-1",
    "ratelimit": "private-2",
    "anthropic-ratelimit-tokens-remaining": "private-3",
    "openai-organization": "private-org",
    "openai-processing-ms": "private-4",
    "anthropic-organization-id": "private-org",
    "retry-after": "private-5",
    "date": "Mon, 01 Jan 2001 00:00:00 GMT",
    "via": "1.1 private",
    "server": "private",
    "age": "77777",
    "etag": '"private"',
    "cache-control": "private",
    "cache-status": "private; hit",
    "www-authenticate": "private",
    "x-anything-else": "private",
    "x-warmgate-upstream": "private",
    "access-control-allow-origin": "private",
}
OF_A_HIT = {"content-type", "content-length", "date", "cache-status", "age", "x-request-id"}
OF_A_STREAM = OF_A_HIT | {"cache-control", "x-accel-buffering"}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_o39_a_hit_has_no_header_of_the_first_answer(bench: Bench, stream: bool) -> None:
    script = answer()
    for name, value in PRIVATE.items():
        script = script.header(name, value)
    bench.u.reply(script)
    ask = B | {"stream": stream}
    missed = await bench.miss(ask)
    assert "set-cookie" not in missed.response.headers
    assert missed.response.headers.get_list("x-request-id") != ["private-request"]
    assert len(missed.response.headers.get_list("x-request-id")) == 1
    assert len(missed.response.headers.get_list("cache-status")) == 1
    bench.clock.advance(5)
    hits = [await bench.hit(ask) for _ in range(3)]
    for hit in hits:
        assert set(hit.response.headers) == (OF_A_STREAM if stream else OF_A_HIT)
        assert not any("private" in value or "77777" in value for value in hit.response.headers.values())
        assert "2001" not in hit.response.headers["date"]
        assert hit.response.headers["age"] == "5"
    ids = {reply.response.headers["x-request-id"] for reply in [missed, *hits]}
    assert len(ids) == 4


@one_world
async def test_o39_what_concerns_the_caller_of_a_miss_reaches_it_and_its_cookies_stay_here(bench: Bench) -> None:
    bench.u.reply(answer().status(429).header("retry-after", "7").header("x-ratelimit-remaining-requests", "0"))
    missed = await bench.miss(B, cookie="session=mine", authorization_extra="x", x_api_key="mine")
    assert missed.response.headers["retry-after"] == "7"
    assert missed.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert "cookie" not in bench.u.calls[0].headers


@one_world
async def test_o40_the_salt_is_the_gateways_own(world: World) -> None:
    async with StubUpstream() as u:
        salted = upstream(u.url, cache_salt=True)
        async with world.bench(u, upstreams=[salted], tenants=TENANTS, secret=secret(world, "s3cret")) as bench:
            await bench.miss(B, key="K1")
            salts = {"t1": u.calls[-1].json["cache_salt"]}
            await bench.miss(B, key="K2")
            salts["t2"] = u.calls[-1].json["cache_salt"]
            assert salts["t1"] != salts["t2"]
            for number, feigned in enumerate((salts["t1"], "t1", "", None, {"x": 1})):
                await bench.miss(B | {"cache_salt": feigned, "seed": number}, key="K2")
                assert u.calls[-1].json["cache_salt"] == salts["t2"]
                assert u.calls[-1].body.count(b"cache_salt") == 1
            spelled = orjson.dumps(B | {"seed": 9})[:-1] + b',"cache\\u005fsalt":"%s"}' % salts["t1"].encode()
            await bench.miss(spelled, key="K2")
            assert u.calls[-1].json == B | {"seed": 9, "cache_salt": salts["t2"]}
            await bench.miss(B | {"stream": True, "seed": 10, "stream_options": {"include_usage": True}}, key="K1-too")
            assert u.calls[-1].json["cache_salt"] == salts["t1"], "two keys of one tenant share"
            for path, ask in EVERY_API.values():
                for body in (ask, {**ask, "cache_salt": salts["t1"], "seed": 11}):
                    await bench.miss(body, path, key="K2", cache_control="no-cache")
                    assert u.calls[-1].json["cache_salt"] == salts["t2"]
            assert not any(len(name) > 2 and name in salts["t1"] for name in ("t1", "s3cret", "K1"))
            await bench.hit(B | {"cache_salt": "whatever"}, key="K1")
        async with world.bench(u, upstreams=[salted], tenants=TENANTS, secret=secret(world, "other")) as bench:
            await bench.send(B, key="K1", cache_control="no-cache")
            assert u.calls[-1].json["cache_salt"] not in salts.values()


@one_world
async def test_o40_an_upstream_without_salts_is_sent_none(two: Bench) -> None:
    for path, ask in EVERY_API.values():
        await two.miss({**ask, "cache_salt": "mine"}, path, key="K1")
        assert two.u.calls[-1].json == ask
        await two.hit(ask, path, key="K1")


@one_world
async def test_o40_a_batch_of_embeddings_asked_for_in_part_is_salted_as_well(world: World) -> None:
    path, ask = EMBEDDINGS
    async with StubUpstream() as u:
        salted = [upstream(u.url, cache_salt=True)]
        async with world.bench(u, upstreams=salted, tenants=TENANTS) as bench:
            await bench.miss(ask, path, key="K1")
            await bench.miss({**ask, "input": ["a", "c"], "cache_salt": "t2"}, path, key="K1")
        assert u.calls[1].json["input"] == ["c"]
        assert u.calls[0].json["cache_salt"] == u.calls[1].json["cache_salt"] != "t2"


def secret(world: World, text: str) -> str:
    """A secret as the configuration names it."""
    path = world.folder / f"{text}.txt"
    path.write_text(text)
    return f"file:{path}"


class Marker:
    """Unpickling one makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self._path,)


def torch_file(pickled: bytes) -> bytes:
    """As ``torch.save`` writes: a zip with a pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


@pytest.mark.parametrize("world", ["disk-wire", "disk-full", "redis-wire", "redis-full"], indirect=True)
async def test_o41_stored_bytes_are_never_run(bench: Bench, tmp_path: Path) -> None:
    runtime = bench.gateway.app.runtime
    assert runtime.shared is not None
    key, marker = await bench.key_of(B), tmp_path / "marker"
    pickled = pickle.dumps(Marker(marker))
    pickle.loads(pickled)
    assert marker.exists(), "the payload works"
    marker.unlink()
    envelope = b"WGE\x01" + bytes(16) + pickled
    for number, payload in enumerate((pickled, torch_file(pickled), envelope, b"!!python/object/apply:os.getcwd []")):
        await runtime.shared.store.set(key, payload, 60)
        reply = await bench.miss(B)
        assert reply.text == f"ans-{number + 1}"
        assert not marker.exists()
        assert runtime.recall.bad_entries.total() > number
        assert (await bench.hit(B)).text == reply.text
    metrics = (await bench.gateway.client.get("/metrics")).text
    assert "warmgate_bad_entries_total" in metrics


def test_o41_nothing_here_can_unpickle() -> None:
    """The modules that read stored bytes do not even import what could run them."""
    root = Path(__file__).parents[2]
    for path in [*(root / "cache").rglob("*.py"), *(root / "gateway").rglob("*.py")]:
        text = path.read_text()
        for dangerous in ("import pickle", "import marshal", "import shelve", "import dill", " eval("):
            assert dangerous not in text, f"{path} holds {dangerous!r}"


@one_world
async def test_o38_a_key_in_either_header_is_the_same_key(two: Bench) -> None:
    await two.miss(B, key="K1")
    await two.hit(B, x_api_key="K1")
    await two.miss(B, x_api_key="K2")
    both = await two.send(B, key="K2", x_api_key="K1")
    assert both.text == "ans-2", "Authorization decides, and the other is not looked at"
    twice = await two.gateway.client.post(
        "/v1/chat/completions", json=B, headers=httpx.Headers([("authorization", "Bearer K1"), ("authorization", "x")])
    )
    assert twice.status_code == 401
