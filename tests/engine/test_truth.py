"""The engine against independent implementations: llama.cpp's token ids, transformers' logits and greedy texts.

The golden files are made by `make_golden.py`; how is written there.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore, Generation
from engine.model.chat import ChatTemplate
from engine.model.weights import open_model
from tests.engine.drive import GREEDY, run_all
from tests.engine.make_golden import FIXED, QUESTIONS, STEPS, prompt

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "tokens.json").read_text())


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    torch.set_num_threads(1)
    return EngineCore(EngineConfig(kv_bytes=256 << 20), open_model("smollm2-135m-instruct"))


def test_token_ids_equal_llama_cpps_on_a_long_mixed_text(engine: EngineCore) -> None:
    text = (DATA / "mixed.txt").read_bytes().decode()
    assert engine.tokenizer.encode(text) == GOLDEN["mixed"]


def test_decoding_gives_the_text_back(engine: EngineCore) -> None:
    text = (DATA / "mixed.txt").read_bytes().decode()
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "").replace("<|endoftext|>", "")
    plain = plain.replace("<repo_name>", "").replace("<file_sep>", "")
    assert engine.tokenizer.decode(engine.tokenizer.encode(plain)) == plain


def test_the_chat_template_and_its_ids_equal_the_reference(engine: EngineCore) -> None:
    template = ChatTemplate(engine.tokenizer)
    for question, ids in zip(QUESTIONS, GOLDEN["chats"], strict=True):
        text = template.render([{"role": "user", "content": question}])
        assert text == prompt(question)
        assert engine.tokenizer.encode(text) == ids


def test_logits_of_a_fixed_prompt_are_within_a_thousandth_of_transformers(engine: EngineCore) -> None:
    ids = engine.tokenizer.encode(FIXED)
    assert ids == GOLDEN["fixed"]
    golden = np.load(DATA / "logits.npz")
    engine.add(Generation("fixed", ids, 1, GREEDY))
    [chunk] = engine.scheduler.schedule().prefills
    rows = engine.model.logits(engine.runner.prefill(chunk)).numpy()
    engine.cancel("fixed")
    assert np.abs(rows[-1] - golden["last"]).max() < 1e-3
    assert np.abs(rows[:, ::512] - golden["every"]).max() < 1e-3


def test_greedy_texts_equal_transformers(engine: EngineCore) -> None:
    golden = json.loads((DATA / "greedy.json").read_text())
    assert len(golden) >= 10
    jobs = [Generation(str(i), ids, STEPS, GREEDY) for i, ids in enumerate(GOLDEN["chats"])]
    got = run_all(engine, jobs)
    for i, expected in enumerate(golden):
        assert got[str(i)].tokens == expected, QUESTIONS[i]
    engine.check_integrity()
