"""Makes the golden files the engine's truth is held against; run by hand, never by the tests.

    python tests/engine/make_golden.py tokens MODEL.gguf   # needs llama-cpp-python (made with 0.3.36)
    python tests/engine/make_golden.py logits MODEL.gguf   # needs transformers and gguf (made with 5.24.0, 0.19.0)

Both are independent of the engine: llama.cpp's own tokenizer, and transformers' own GGUF reader and Llama. The greedy
runs are fed the golden token ids of their prompts through the chat template as llama.cpp tokenizes them, since
transformers' own GGUF tokenizer lacks the digit split (its ids differ).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = (
    "What is the capital of France?",
    "What is 17 + 25?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Translate to French: good morning",
    "Why is the sky blue?",
    "List the first five prime numbers.",
    "Say hello in Japanese.",
    "Write a haiku about rain.",
    "What does a Python list comprehension look like?",
    "Who wrote Romeo and Juliet? 🙂",
    "Summarise: the cat sat on the mat, then it left.",
)
FIXED = "In 1969, the first people landed on the Moon; 55 years later, the question 'what next?' is still open. 🚀 "
STEPS = 32


def prompt(question: str) -> str:
    """SmolLM2's chat template, written out by hand."""
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def tokens(model: str) -> None:
    from llama_cpp import Llama  # type: ignore[import-not-found]

    llama = Llama(model_path=model, vocab_only=True, verbose=False)

    def ids(text: bytes) -> list[int]:
        return llama.tokenize(text, add_bos=False, special=True)

    golden = {
        "mixed": ids((DATA / "mixed.txt").read_bytes()),
        "fixed": ids(FIXED.encode()),
        "chats": [ids(prompt(question).encode()) for question in QUESTIONS],
    }
    (DATA / "tokens.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


def logits(model: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(model)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    golden = json.loads((DATA / "tokens.json").read_text())
    with torch.inference_mode():
        rows = reference(torch.tensor([golden["fixed"]])).logits[0].numpy()
        np.savez_compressed(DATA / "logits.npz", last=rows[-1], every=rows[:, ::512])
        greedy = []
        for ids in golden["chats"]:
            out = reference.generate(  # type: ignore[reportAttributeAccessIssue]
                torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=2, pad_token_id=2
            )
            greedy.append(out[0, len(ids) :].tolist())
            print(greedy[-1], file=sys.stderr)
    (DATA / "greedy.json").write_text(json.dumps(greedy, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    {"tokens": tokens, "logits": logits}[sys.argv[1]](sys.argv[2])
