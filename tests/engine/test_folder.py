"""Model folders against transformers itself: each family, random weights, logits and greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import EngineCore, Generation
from engine.errors import ModelError
from engine.model.weights import open_model
from tests.engine import tiny
from tests.engine.drive import GREEDY, run

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def saved(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    """A random model of a family, written as transformers writes it, with the tiny tokenizer beside it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # a fresh bias is zero and a fresh norm one: nothing would be tested
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tiny.tokenizer().save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(tiny.TEMPLATE)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    family, changes = FAMILIES[name]
    model = saved(tmp_path, family, changes)
    ids = tiny.tokenizer().encode("The quick brown fox jumps over the lazy dog, twice. " * 2)
    core = EngineCore(tiny.config(speculate="off"), open_model(str(tmp_path)))  # one row of logits for each token
    step_logits = core.model.logits
    seen: list[torch.Tensor] = []
    core.model.logits = lambda hidden, **more: seen.append(step_logits(hidden, **more)) or seen[-1]  # type: ignore[method-assign]
    result = run(core, Generation("a", ids, 12, GREEDY, ignore_eos=True))
    with torch.inference_mode():
        whole = model(torch.tensor([ids + result.tokens])).logits[0]
    for at, logits in enumerate(seen):
        assert (logits[0] - whole[len(ids) - 1 + at]).abs().max() < 1e-3
    assert result.tokens == whole[len(ids) - 1 : -1].argmax(-1).tolist()


def broken(folder: Path, change: Any) -> str:
    saved(folder, "Llama", {})
    change(folder)
    with pytest.raises(ModelError) as caught:
        EngineCore(tiny.config(), open_model(str(folder)))
    return str(caught.value)


def rewrite(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100), "safetensors"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "adapter"),
        (rewrite(model_type="mamba"), "mamba"),
        (rewrite(num_attention_heads=None), "config.json"),
        (rewrite(num_hidden_layers=3), "no tensor"),
        (rewrite(vocab_size=300), "shape"),
        (rewrite(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "yarn"),
        (rewrite(quantization_config={"bits": 4}), "quantised"),
        (rewrite(hidden_act="gelu"), "gelu"),
        (rewrite(partial_rotary_factor=0.5), "rotates"),
        (rewrite(num_key_value_heads=3), "3 KV heads"),
        (rewrite(num_attention_heads=-4), "heads = -4"),
        (rewrite(head_dim=7), "of 7"),
        (rewrite(rms_norm_eps=float("nan")), "norm epsilon"),
        (rewrite(max_position_embeddings=1 << 40), "context"),
        (rewrite(rope_parameters={"rope_type": "linear", "factor": 0}), "rope factor"),
    ],
)
def test_a_broken_folder_is_one_clear_sentence(tmp_path: Path, change: Any, word: str) -> None:
    assert word in broken(tmp_path, change)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}])
def test_a_bias_that_would_be_left_out_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    saved(tmp_path, "Llama", changes)
    with pytest.raises(ModelError, match="has a bias"):
        open_model(str(tmp_path))


def test_another_configuration_of_the_same_weights_is_another_model(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", {})
    before = open_model(str(tmp_path)).digest
    assert open_model(str(tmp_path)).digest == before
    rewrite(rms_norm_eps=1e-3)(tmp_path)
    assert open_model(str(tmp_path)).digest != before
