"""Who may share a block: equal prompts under equal salts, in every process; an adapter is refused (O-57, O-61)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cache.prefix.blocks import chain
from engine.api import ChatRequest, CompletionRequest, parse
from engine.core import EngineCore
from engine.errors import RequestError
from tests.cache.prefix.helpers import RedisServer
from tests.engine import tiny
from tests.engine.drive import run
from tests.engine.test_prefix import job, prompt, reference


@pytest.fixture
def core() -> EngineCore:
    return tiny.core()


def test_o57_salts_part_the_blocks_and_no_adapter_name_finds_them(core: EngineCore) -> None:
    ids = prompt(33)
    for salt in (b"", b"S", b"a|b", b"a"):
        result = run(core, job(f"salted {salt!r}", ids, salt=salt))
        assert (result.cached, result.tokens) == (0, reference(ids))
    assert len({block.digest for block in core.manager.indexed()}) == 4 * 8
    for adapter, salt in [("S", b""), ("a|b", b""), ("a", b"b"), ("", b""), ("S", b"S")]:
        named = chain(ids, 4, salt=salt, adapter=adapter)
        assert not any(core.manager.find(block) for block in named), (adapter, salt)
    assert run(core, job("again", ids, salt=b"S")).cached == 32


@pytest.mark.parametrize("field", ["lora_path", "lora_request", "adapter_id", "adapters"])
def test_o57_an_adapter_is_refused_not_ignored(field: str) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    text = {"model": "tiny", "prompt": "Hi"}
    for kind, body in ((ChatRequest, chat), (CompletionRequest, text)):
        parse(kind, json.dumps(body | {field: None, "user": "u"}).encode()).refuse_unsupported()
        with pytest.raises(RequestError, match="adapter") as caught:
            parse(kind, json.dumps(body | {field: "S"}).encode()).refuse_unsupported()
        assert (caught.value.status, caught.value.param) == (400, field)


ENGINE = """
import json, sys
from tests.engine.test_lower import *
core = tiny.core(64, kv_remote=sys.argv[1], write_through_uses=1)
core.lower.stack.observe_prefill = lambda tokens, seconds: None
result = drive(core, job("a", prompt(60), salt=b"tenant"))
print(json.dumps([result.cached, result.tokens, core.layout.digest.hex(), result.sequence.chain[-1].digest.hex()]))
core.close()
"""


def test_o61_engines_with_different_hash_seeds_share_one_store(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        seen = []
        for seed in ("0", "1", "random"):
            environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-c", ENGINE, redis.url]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            seen.append(json.loads(done.stdout))
        assert [cached for cached, *_ in seen] == [0, 56, 56]
        assert seen[0][1:] == seen[1][1:] == seen[2][1:]
        assert seen[0][1] == reference(prompt(60))
    finally:
        redis.kill()
