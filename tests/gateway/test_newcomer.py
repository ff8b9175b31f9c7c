"""What a newcomer tries first, and gets wrong: each is answered in one clear sentence, and nothing falls over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from cache.response.faq import FaqError, read_faq
from gateway.config import Config
from gateway.runtime import Runtime
from gateway.source import shortcomings
from loadtest.stub_upstream import StubUpstream
from tests.field.conftest import B, Bench
from tests.gateway.conftest import Start
from tests.harness import running_gateway, upstream

FAQ = '- ask: "When was OpenAI founded?"\n  answer: "In December 2015."\n'
ASKED = {"role": "user", "content": "when was openai founded"}


@pytest.fixture
def faq(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "faq.yaml"
    path.write_text(FAQ)
    return {"path": str(path)}


async def explained(bench: Bench, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await bench.gateway.client.post("/admin/explain", params={"path": path}, json=body, headers=named)).json()


def _becomes_folder(path: str) -> None:
    Path(path).unlink()
    Path(path).mkdir()


def _beside(path: str) -> list[str]:
    return [found.name for found in Path(path).parent.iterdir()]


class TestExplain:
    async def test_a_curated_question(self, start: Start, faq: dict[str, Any]) -> None:
        async with start(faq=faq) as bench:
            told = await explained(bench, {"model": "m1", "messages": [ASKED]})
            assert told["would"] == "faq"
            assert told["faq"] == {"served": True, "reason": "the question is a curated one"}

    @pytest.mark.parametrize(
        ("path", "body", "reason"),
        [
            ("chat/completions", {"messages": [{"role": "system", "content": "Be brief."}, ASKED]}, "a system prompt"),
            ("chat/completions", {"messages": [ASKED], "tools": [{"type": "function"}]}, "text can give: tools"),
            ("chat/completions", {"messages": [ASKED], "max_tokens": 3}, "text can give: max_tokens"),
            ("completions", {"prompt": "when was openai founded"}, "more than a curated text can give"),
            ("responses", {"input": "when was openai founded"}, "more than a curated text can give"),
        ],
    )
    async def test_why_a_curated_answer_is_not_given(
        self, start: Start, faq: dict[str, Any], path: str, body: dict[str, Any], reason: str
    ) -> None:
        async with start(faq=faq) as bench:
            body = {"model": "m1", **body}
            told = await explained(bench, body, f"/v1/{path}")
            assert told["would"] != "faq"
            assert not told["faq"]["served"]
            assert reason in told["faq"]["reason"]
            answer = await bench.send(body, f"/v1/{path}")
            assert "detail=faq" not in answer.cache_status

    async def test_a_caller_who_wants_a_new_answer(self, start: Start, faq: dict[str, Any]) -> None:
        async with start(faq=faq) as bench:
            told = await explained(bench, {"model": "m1", "messages": [ASKED]}, cache_control="no-cache")
            assert "wants a new answer" in told["faq"]["reason"]

    async def test_any_other_question_is_not_a_curated_one(self, start: Start, faq: dict[str, Any]) -> None:
        async with start(faq=faq) as bench:
            assert (await explained(bench, B))["faq"] is None

    async def test_a_model_that_nobody_serves(self, start: Start) -> None:
        async with start() as bench:
            told = await explained(bench, B | {"model": "nope"})
            assert (told["would"], told["reason"]) == ("error", "no upstream serves the model 'nope'")


class TestAdmin:
    @pytest.mark.parametrize("body", [b"", b"{bad", b"[1]", b"{}"])
    async def test_a_purge_that_names_nothing(self, start: Start, body: bytes) -> None:
        async with start() as bench:
            refused = await bench.gateway.client.post("/admin/purge", content=body)
            assert refused.status_code == 400
            assert isinstance(refused.json()["detail"], str)

    async def test_a_purge_needs_no_content_type(self, start: Start) -> None:
        async with start() as bench:
            assert (await bench.gateway.client.post("/admin/purge", content=b'{"all": true}')).status_code == 200

    async def test_a_faq_file_that_cannot_be_written_or_read(self, start: Start, faq: dict[str, Any]) -> None:
        async with start(faq=faq) as bench:
            _becomes_folder(faq["path"])
            for answer in (
                await bench.gateway.client.put("/admin/faq", content=FAQ),
                await bench.gateway.client.get("/admin/faq"),
            ):
                assert answer.status_code == 500
                assert answer.json()["detail"].endswith("Is a directory.")
            assert _beside(faq["path"]) == ["faq.yaml"]


class TestPaths:
    async def test_an_alias_is_a_model(self, start: Start) -> None:
        async with start(models={"fast": {"target": "m1"}}) as bench:
            client = AsyncOpenAI(base_url=f"{bench.gateway.url}/v1", api_key="none", max_retries=0)
            assert (await client.models.retrieve("fast")).owned_by == "warmgate"

    @pytest.mark.parametrize("path", ["/v1/../admin/status", "/v1/%2e%2e/metrics", "/v1/files/./x"])
    async def test_no_path_leads_out_of_v1(self, start: Start, u: StubUpstream, path: str) -> None:
        async with start() as bench:
            target = path.encode()
            request = bench.gateway.client.build_request("POST", "/", json={}, extensions={"target": target})
            refused = await bench.gateway.client.send(request)
            assert refused.status_code == 404
            assert "leads nowhere" in refused.json()["error"]["message"]
            assert u.n == 0

    async def test_a_path_is_passed_on_as_it_was_spelled(self, start: Start, u: StubUpstream) -> None:
        async with start() as bench:
            target = b"/v1/files/a%20b%2Fc%3Fd?e=f%20g"
            await bench.gateway.client.send(
                bench.gateway.client.build_request("POST", "/", json={}, extensions={"target": target})
            )
            assert [call.target for call in u.calls if call.path.startswith("/v1/files")] == [target.decode()]

    @pytest.mark.parametrize("path", ["/chat/completions", "/", "//v1/chat/completions"])
    async def test_an_address_without_v1(self, start: Start, path: str) -> None:
        async with start() as bench:
            request = bench.gateway.client.build_request("POST", "/", json=B, extensions={"target": path.encode()})
            refused = await bench.gateway.client.send(request)
            assert refused.status_code == 404
            assert refused.json()["error"]["message"] == f"There is no {path} here; the API is below /v1."

    async def test_what_is_open_to_whoever_reaches_the_port(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Names and counts, nothing of any request; all else needs a key."""
        monkeypatch.setenv("ADMIN", "admin-key")
        monkeypatch.setenv("T1", "tenant-key")
        locked = {"admin": {"key": "env:ADMIN"}, "tenants": [{"name": "t1", "keys": ["env:T1"]}]}
        async with start(**locked, cache={"disk": "off"}) as bench:
            await bench.send({**B, "messages": [{"role": "user", "content": "a secret question"}]}, key="tenant-key")
            for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/dashboard"):
                told = await bench.gateway.client.get(path)
                assert told.status_code == 200
                assert not any(word in told.text for word in ("secret question", "admin-key", "tenant-key"))
            for path in ("/admin/status", "/admin/sentinels", "/admin/ledger", "/dashboard/api/overview", "/v1/models"):
                assert (await bench.gateway.client.get(path)).status_code == 401

    async def test_a_store_in_order_reads_as_such(self, start: Start, tmp_path: Path) -> None:
        async with start(cache={"disk": {"path": str(tmp_path)}}) as bench:
            ready = (await bench.gateway.client.get("/readyz")).json()
            assert ready == {"status": "ready", "stores": {"disk": "ok"}}

    @pytest.mark.parametrize("path", ["/healthz", "/readyz"])
    async def test_load_balancers_that_ask_with_head(self, start: Start, path: str) -> None:
        async with start() as bench:
            assert (await bench.gateway.client.head(path)).status_code == 200


class TestConfiguration:
    async def test_a_reload_names_what_waits_for_the_next_start(self, u: StubUpstream) -> None:
        config = {"upstreams": [upstream(u.url)], "cache": {"disk": "off"}, "ledger": "off"}
        changed = Config.model_validate({**config, "listen": {"port": 9}, "cache": {"disk": "off", "ttl": 9}})
        async with running_gateway({**config, "cache": {"disk": "off", "holdout": 0.01}}, None, lambda: changed) as one:
            told = await one.client.post("/admin/reload")
            assert told.json() == {"reloaded": True, "at_next_start": ["listen"]}
            assert (one.app.runtime.config.cache.ttl, one.app.runtime.config.listen.port) == (9, 8080)

    def test_a_model_file_that_is_missing(self, tmp_path: Path) -> None:
        missing = tmp_path / "none.gguf"
        config = Config.model_validate({"engine": {"model": str(missing)}, "ledger": "off"})
        assert shortcomings(config) == [f"engine.model: there is no file or folder {missing}"]

    def test_a_disk_cache_whose_folder_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        disk = {"path": str(tmp_path / "file")}
        runtime = Runtime(Config.model_validate({"engine": "off", "ledger": "off", "cache": {"disk": disk}}))
        assert len(runtime.secret) == 32

    def test_curated_answers_for_half_a_model_name(self) -> None:
        with pytest.raises(FaqError, match="'gpt-\\*' is neither"):
            read_faq(FAQ + '  models: ["gpt-*"]\n')
