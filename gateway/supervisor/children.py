"""Child processes: started so that they end with their parent, ended with time to finish their work."""

import asyncio
import ctypes
import os
import signal
import site
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Child:
    """One process to keep alive. ``feed`` is written to its standard input, which then stays open."""

    name: str
    command: list[str]
    fds: tuple[int, ...] = ()
    feed: Callable[[], bytes] | None = None
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # handed over where no process list shows them
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> asyncio.subprocess.Process:
        """Raises OSError when there is no such program."""
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE if self.feed else asyncio.subprocess.DEVNULL,
            pass_fds=self.fds,
            env={**environment(), **self.secrets},
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then drains in order
            preexec_fn=_end_with_parent,
        )
        self.send()
        return self.process

    def send(self) -> None:
        """Hands the present feed to the running process."""
        if self.feed and self.running and self.process and self.process.stdin:
            self.process.stdin.write(self.feed())

    def signal(self, number: int) -> None:
        if self.running and self.process:
            self.process.send_signal(number)


async def end(children: Sequence[Child], grace: float) -> bool:
    """SIGTERM to all, time to finish, then SIGKILL. True when all ended in time."""
    waits = []
    for child in children:
        child.signal(signal.SIGTERM)
        if child.running and child.process:
            waits.append(asyncio.ensure_future(child.process.wait()))
    if not waits:
        return True
    _, late = await asyncio.wait(waits, timeout=grace)
    if late:
        for child in children:
            child.signal(signal.SIGKILL)
        await asyncio.wait(late)
    return not late


def python_module(module: str) -> list[str]:
    """A module of ours in a new interpreter; -P keeps a folder named like one of our packages from being taken."""
    return [sys.executable, "-P", "-m", module]


def ending(code: int) -> str:
    """An exit status in words."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def environment() -> dict[str, str]:
    """The environment with our own packages importable, also from a checkout that is not installed."""
    root = str(Path(__file__).resolve().parents[2])
    if root in site.getsitepackages():
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *([known] if known else [])])}


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """In the child: be sent SIGTERM when the supervisor dies, however it dies."""
    if _libc:
        _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
