"""The ledger as Parquet: what JSON says, typed, and read back by the format's own reader."""

from __future__ import annotations

import io
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gateway.ledger import parquet
from loadtest.stub_upstream import StubUpstream
from tests.gateway.known_traffic import Script
from tests.harness import Running, running_gateway

read_parquet: Any = import_module("arro3.io").read_parquet
NOTHING: dict[str, Any] = {"upstreams": [], "engine": "off"}


async def table(gateway: Running, path: str) -> Any:
    answer = await gateway.client.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    return read_parquet(io.BytesIO(answer.content)).read_all()


def lines(found: Any) -> list[dict[str, Any]]:
    columns = {name: found.column(name).to_pylist() for name in found.column_names}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def types(found: Any) -> dict[str, str]:
    return {field.name: re.findall(r"<(\w+)", str(field.type))[0] for field in found.schema}


async def test_it_says_what_json_says(tmp_path: Path) -> None:
    async with StubUpstream(models=("m1", "unpriced")) as u:
        script = Script(tmp_path, u)
        async with running_gateway(script.config, script.clock) as gateway:
            await script.first(gateway)
            for question in ("?by=outcome", "?by=tenant,model,stream&step=1m", "?by=model&outcome=stale"):
                told = (await gateway.client.get(f"/admin/ledger{question}")).json()["groups"]
                found = await table(gateway, f"/admin/ledger{question}&format=parquet")
                assert lines(found) == told
                assert len(told) > 0
            rows = (await gateway.client.get("/admin/ledger/rows?limit=1000")).json()["rows"]
            found = await table(gateway, "/admin/ledger/rows?limit=1000&format=parquet")
            assert lines(found) == rows
            assert any(row["prompt_tokens"] is None for row in rows)  # unknown is null


async def test_types_are_the_same_whatever_the_numbers(tmp_path: Path) -> None:
    async with StubUpstream(models=("m1", "unpriced")) as u:
        script = Script(tmp_path, u)
        async with running_gateway(script.config, script.clock) as gateway:
            paths = ("/admin/ledger?by=stream,model&step=1h", "/admin/ledger/rows?")
            empty = [await table(gateway, f"{path}&format=parquet") for path in paths]
            await script.first(gateway)
            full = [await table(gateway, f"{path}&format=parquet") for path in paths]
            assert [found.num_rows for found in empty] == [0, 0]
            assert all(found.num_rows > 0 for found in full)
            assert [types(found) for found in empty] == [types(found) for found in full]
            names = {"at": "Int64", "stream": "Boolean", "model": "Utf8", "cost_usd": "Float64", "hit_rate": "Float64"}
            assert {name: kind for name, kind in types(full[0]).items() if name in names} == names


async def test_hostile_names_are_only_text() -> None:
    line = {"model": "=cmd|'/c calc'!A1\0", "n": 2**62}
    found = read_parquet(io.BytesIO(parquet.as_parquet([line], {"model": "", "n": 0}))).read_all()
    assert lines(found) == [line]


async def test_without_the_extra_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ledger.parquet.find_spec", lambda name: None)
    async with running_gateway(NOTHING) as gateway:
        for path in ("/admin/ledger", "/admin/ledger/rows", "/dashboard/api/rows"):
            answer = await gateway.client.get(f"{path}?format=parquet")
            assert answer.status_code == 501
            assert "pip install 'warmgate[parquet]'" in answer.json()["detail"]
        assert (await gateway.client.get("/admin/ledger?format=xml")).status_code == 400
