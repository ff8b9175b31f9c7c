"""`python -m engine`: the command line of the engine process."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import sys

from engine.config import EngineConfig
from engine.errors import ModelError


def size(text: str) -> int:
    """`256MiB`, `2GB`, `1048576` to bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256MiB or 2GB")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names a default where there is one to name."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return (
            action.help
            if isinstance(action.default, bool) or action.default == ""
            else super()._get_help_string(action)
        )


def parser() -> argparse.ArgumentParser:
    """Every option, with the defaults of `EngineConfig`."""
    default = EngineConfig()
    top = argparse.ArgumentParser(
        prog="warmgate engine",
        description="An OpenAI-compatible inference server for one Llama-family model, with paged, prefix-shared KV.",
        formatter_class=_Help,
    )
    top.add_argument(
        "--model", default=default.model, help="a bundled model's name, a GGUF file or a safetensors folder"
    )
    top.add_argument("--served-model-name", default="", help="the name clients use (empty: from --model)")
    top.add_argument("--host", default=default.host, help="address to listen on")
    top.add_argument("--port", type=int, default=default.port, help="port to listen on")
    top.add_argument("--device", default=default.device, help="auto, cpu, cuda or cuda:N")
    top.add_argument("--dtype", default=default.dtype, help="auto (float32 on CPU), float32 or bfloat16")
    top.add_argument("--block-size", type=int, default=default.block_size, help="tokens in one KV block")
    top.add_argument("--prefill-chunk", type=int, default=default.prefill_chunk, help="tokens of one prefill pass")
    top.add_argument("--kv-cache", dest="kv_bytes", type=size, default=0, help="KV pool, e.g. 1GiB (0: by free memory)")
    top.add_argument("--max-context", type=int, default=0, help="longest prompt plus answer (0: the model's own)")
    top.add_argument("--step-tokens", type=int, default=default.step_tokens, help="prompt tokens of one step")
    top.add_argument("--max-running", type=int, default=default.max_running, help="sequences that may run at once")
    top.add_argument("--threads", type=int, default=0, help="threads of matrix products (0: all cores)")
    top.add_argument("--kv-host", dest="kv_host_bytes", type=size, default=0, help="host memory for KV, e.g. 2GiB")
    top.add_argument(
        "--kv-remote",
        default=os.environ.get("ENGINE_KV_REMOTE", ""),
        help="redis://… or lmcache://host:port for KV blocks (empty: $ENGINE_KV_REMOTE, or none)",
    )
    top.add_argument("--kv-host-quota", type=size, default=0, help="host memory one tenant may hold (0: no limit)")
    top.add_argument("--kv-remote-quota", type=size, default=0, help="bytes one tenant may hold in Redis (0: no limit)")
    top.add_argument(
        "--write-through-uses", type=int, default=2, help="prompts that must use a block before it is stored remotely"
    )
    top.add_argument(
        "--kv-transfer",
        default="",
        help="host:port at which other engines fetch what was computed for them (empty: none)",
    )
    top.add_argument(
        "--kv-transfer-lease", type=float, default=default.kv_transfer_lease, help="seconds such a prompt is kept"
    )
    top.add_argument(
        "--kv-transfer-patience", type=float, default=default.kv_transfer_patience, help="seconds a fetch may take"
    )
    top.add_argument(
        "--kv-transfer-peers",
        type=lambda text: tuple(filter(None, text.split(","))),
        default="",
        help="hosts to fetch prompts from, separated by commas (empty: only this one)",
    )
    top.add_argument("--kv-events", default="", help="ZMQ endpoint for KV events in vLLM's format (empty: none)")
    top.add_argument("--kv-events-replay", default="", help="ZMQ endpoint to replay KV events from (empty: none)")
    top.add_argument("--int8-decode", action="store_true", help="decode with int8 weights: faster, a little less exact")
    top.add_argument("--no-prefix-reuse", dest="prefix_reuse", action="store_false", help="never reuse a prefix")
    top.add_argument(
        "--speculate",
        choices=("auto", "off"),
        default=default.speculate,
        help="auto: verify guessed tokens several at once, where that does not change a bit",
    )
    top.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="how much to say"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs the engine; returns the exit code: 0 after a signal, 2 when it could not be started."""
    options = vars(parser().parse_args(argv))
    logging.basicConfig(
        level=options.pop("log_level").upper(),
        stream=sys.stderr,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    try:
        config = EngineConfig(**{field.name: options[field.name] for field in dataclasses.fields(EngineConfig)})
        from engine.server import run  # loads torch: only after the arguments are known to be good

        run(config)
    except ModelError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    return 0


_LARGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"  # other arenas than the first have small pages


def with_large_pages() -> None:
    """Starts this process anew, unless the user has chosen otherwise, with its memory in pages of 2 MB.

    With pages of 4 KB, looking them up takes as long as reading the weights. glibc (from 2.35 on) asks the kernel for
    large ones if this is in the environment when a process begins.
    """
    chosen = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and "glibc.malloc.hugetlb" not in chosen:
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (chosen, _LARGE_PAGES)))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


_SPINS = "3000"  # some 10 microseconds: long enough for the next product to begin


def with_patient_threads() -> None:
    """Lets threads that wait for others of a matrix product sleep soon, unless the user has chosen otherwise.

    By default they keep their processors busy for milliseconds. Where other processes want these too, the very threads
    that are waited for do not get them, and a prefill takes five to ten times as long. To be called before torch is
    loaded, whose GNU OpenMP reads this once.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


if __name__ == "__main__":
    with_patient_threads()
    with_large_pages()
    sys.exit(main())
