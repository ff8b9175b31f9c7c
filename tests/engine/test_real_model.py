"""The model folder that vLLM reads in `make test-real`: the shipped model itself, and its tokens to the last digit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.model.chat import ChatTemplate
from engine.model.weights import open_model
from tests.real.model import save

transformers = pytest.importorskip("transformers")

TEXT = "In 2026, 1234567.89 naïve foxes — 日本 — met 42 owls.\n\n\tdef f(x):  # 007\n"


@pytest.mark.real
def test_the_folder_holds_the_shipped_model(tmp_path: Path) -> None:
    shipped = open_model("smollm2-135m-instruct")
    save(shipped, tmp_path)
    folder = open_model(str(tmp_path))
    assert replace(folder.spec, name=shipped.spec.name) == shipped.spec
    for name in ("embed", "norm", "layers.0.q.weight", "layers.7.k.weight", "layers.29.down.weight"):
        assert torch.equal(folder.tensor(name), shipped.tensor(name).bfloat16().float()), name
    ids = shipped.tokenizer.encode(TEXT)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(TEXT, add_special_tokens=False) == folder.tokenizer.encode(TEXT) == ids
    assert theirs.decode(ids) == TEXT
    assert folder.tokenizer.ends == shipped.tokenizer.ends
    turns = [{"role": "user", "content": TEXT}]
    prompt = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == ChatTemplate(folder.tokenizer).render(turns) == ChatTemplate(shipped.tokenizer).render(turns)
