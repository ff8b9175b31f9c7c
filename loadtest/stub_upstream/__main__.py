"""Run the stub upstream by hand: `python -m loadtest.stub_upstream --port 9001 --model m1 --chunk-delay 0.02`."""

import argparse
import asyncio

import uvloop

from loadtest.digest import digest_of
from loadtest.stub_upstream import Call, Reply, Script, StubUpstream, answer


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.stub_upstream", description="A stand-in for an LLM server."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9001, help="0 takes a free one")
    parser.add_argument("--model", action="append", help="name of a model it claims to serve; may be repeated")
    parser.add_argument("--delay", type=float, default=0.0, metavar="S", help="seconds before each answer")
    parser.add_argument("--chunk-delay", type=float, default=0.0, metavar="S", help="seconds between streamed chunks")
    parser.add_argument("--tokens", type=int, metavar="N", help="length of each answer; absent: `ans-<call number>`")
    parser.add_argument("--digest", action="store_true", help="answer chats with the digest of their messages")
    return parser.parse_args()


def _script(delay: float, chunk_delay: float, tokens: int | None, digest: bool) -> Script:
    def reply(call: Call) -> Reply:
        deltas = None if tokens is None else [f"ans-{call.number}", *[" word"] * (tokens - 1)]
        made = answer(digest_of(call.json["messages"])) if digest else answer(deltas=deltas)
        made = made.delayed(delay) if delay else made
        return made.paced(chunk_delay) if chunk_delay else made

    return reply


async def _serve(arguments: argparse.Namespace) -> None:
    models = tuple(arguments.model or ["m1"])
    stub = StubUpstream(models=models, host=arguments.host, port=arguments.port, keep_calls=False)
    stub.always(_script(arguments.delay, arguments.chunk_delay, arguments.tokens, arguments.digest))
    async with stub:
        print(f"stub upstream at {stub.url}/v1, models {', '.join(models)}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        uvloop.run(_serve(_arguments()))
    except KeyboardInterrupt:
        pass
