"""Prefix health in a running gateway and on the command line. What it finds: `tests/policies/test_prefix_health.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gateway import cli
from tests.gateway.conftest import Start
from tests.harness import FakeClock

RULES = " ".join(f"Rule {word}: answer with care." for word in "abcdefghij")


def asked(number: int) -> dict[str, object]:
    system = {"role": "system", "content": f"It is 10:{number:02}. {RULES}"}
    return {"model": "m1", "messages": [system, {"role": "user", "content": "Why?"}]}


async def test_a_running_gateway_tells_what_breaks_its_prefixes(start: Start, clock: FakeClock) -> None:
    async with start() as bench:
        for number in range(5):
            await bench.send(asked(number))
            clock.advance(1)
        told = (await bench.gateway.client.get("/admin/prefix-health")).json()
        assert (told["requests"], told["looked_at"]) == (5, 5)
        (found,) = told["findings"]
        assert (found["kind"], found["path"], found["seen"]) == ("timestamp", "messages[0].content", 4)
        assert (found["tenant"], found["model"]) == ("default", "m1")
        assert found["lost_per_day"] > 0
        (group,) = told["prompts"]
        assert group["shared"] < 0.1


async def test_one_prompt_in_a_while_is_looked_at(start: Start, clock: FakeClock) -> None:
    async with start() as bench:
        for number in range(20):
            await bench.send(asked(number))
            clock.advance(0.1)
        told = (await bench.gateway.client.get("/admin/prefix-health")).json()
        assert told["requests"] == 20
        assert 3 <= told["looked_at"] <= 5


def lint(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["warmgate", "lint", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_lint_names_each_fault_and_how_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(asked(number)) for number in range(4)) + "\n")
    assert lint(monkeypatch, str(file)) == 1
    said = capsys.readouterr().out
    assert "timestamp in messages[0].content, character 9 (m1), seen 3 times" in said
    assert "Put the time behind all that stays the same" in said
    assert lint(monkeypatch, str(file), "--json") == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "timestamp"


def test_lint_of_clean_prompts_in_batch_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "batch.jsonl"
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": asked(1)} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert lint(monkeypatch, str(file)) == 0
    assert "Nothing to mend." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"messages": []}\nnot json\n', "line 2: The request body is not valid JSON"),
        ("\n", "holds no requests"),
        (None, "cannot be read: No such file"),
    ],
)
def test_lint_says_what_it_cannot_read(
    content: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    assert lint(monkeypatch, str(file)) == 2
    assert said in capsys.readouterr().err
