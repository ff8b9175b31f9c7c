"""Prefix health: which prompts could share a beginning and do not, for whom, and what would mend it.

Looks at one request in a while, and compares it with the last ones of the same tenant and model. Prompts are kept as
prints (`policies.prefix_health`), never as text.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cache.response.canonical import BadBody, respell
from policies.prefix_health import (
    CHARS_PER_TOKEN,
    MEND,
    MIN_LOST,
    Break,
    Print,
    Segment,
    find_break,
    fingerprint,
    same_model,
    shared_length,
)

LOOK_EVERY = 0.5
"""Seconds between two prompts that are looked at."""
SHARE = 0.005
"""Of the time that may be spent on looking; a long prompt takes some milliseconds."""
_REMEMBERED = 8
"""Prompts of one tenant and model that a new one is compared with."""
_GROUPS = 256
_FINDINGS = 100
_TOLD = 30
_HEADS = ("tools", "functions", "instructions", "system")
_TURNS = ("messages", "input", "prompt")


def segments_of(body: Mapping[str, Any]) -> list[Segment]:
    """The parts of a request's prompt, of any dialect, in the order in which engines read them: tools one by one,
    instructions, then each turn's text and calls. Raises `BadBody`.
    """
    found: list[Segment] = []
    for name in (*_HEADS, *_TURNS):
        _take(name.replace("functions", "tools"), body.get(name), found)
    return found


def _take(path: str, value: object, found: list[Segment]) -> None:
    if isinstance(value, str):
        found.append(Segment(path, value))
    elif isinstance(value, Mapping) and path.startswith("tools"):
        found.append(Segment(path, respell(value).decode()))
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name not in ("role", "type", "cache_control"):
                _take(path if name == "text" else f"{path}.{name}", part, found)
    elif isinstance(value, Sequence):
        for number, part in enumerate(value):
            _take(f"{path}[{number}]", part, found)
    elif value is not None:
        found.append(Segment(path, respell(value).decode()))


@dataclass(slots=True)
class Finding:
    """One fault: where it is, of what kind, how often it was ``seen``, and the tokens that were ``shared`` before it
    and ``lost`` behind it, all times together.
    """

    tenant: str
    model: str
    path: str
    offset: int
    kind: str
    seen: int = 0
    shared: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Group:
    """The last prompts of one tenant and model. ``reused``: characters that they shared with one before."""

    prints: deque[Print] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    looked_at: int = 0
    size: int = 0
    reused: int = 0


class PrefixHealth:
    """What was seen since the start, within bounds. ``requests`` counts all, also those that were not looked at;
    ``clock`` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], look_every: float = LOOK_EVERY) -> None:
        self.requests = 0
        self._clock = clock
        self._began = self._next = clock()
        self._look_every = look_every
        self._looked_at = 0
        self._groups: OrderedDict[tuple[str, str], _Group] = OrderedDict()
        self._findings: dict[tuple[str, str, str, str], Finding] = {}

    def request(self, tenant: str, model: str, body: Mapping[str, Any], now: float) -> None:
        """Takes note of a request, and looks at it if it is time to. ``now``: monotonic seconds."""
        self.requests += 1
        if now >= self._next:
            began = self._clock()
            self.look(tenant, model, body)
            took = self._clock() - began
            self._next = now + max(self._look_every, took / SHARE)

    def look(self, tenant: str, model: str, body: Mapping[str, Any]) -> Finding | None:
        """Compares a prompt with those before it; the fault that it shows, if any."""
        try:
            segments = segments_of(body)
        except BadBody:
            return None
        if not segments:
            return None
        new = fingerprint(segments)
        group = self._groups.setdefault((tenant, model), _Group())
        self._groups.move_to_end((tenant, model))
        while len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
        self._looked_at += 1
        group.looked_at += 1
        group.size += sum(len(text) for _, text in segments)
        nearest = max(group.prints, key=lambda old: shared_length(old, new), default=None)
        fault: Break | None = None
        shared = 0
        if nearest is not None:
            shared = shared_length(nearest, new)
            fault = find_break(nearest, new, segments)
        group.reused += shared
        finding = self._note(tenant, model, fault) if fault is not None else self._alias(tenant, model, new, shared)
        group.prints.append(new)
        return finding

    def told(self) -> dict[str, Any]:
        """What this worker has seen, the dearest faults and the latest prompts first, for `report`."""
        groups = [
            (tenant, model, group.looked_at, group.size, group.reused)
            for (tenant, model), group in reversed(self._groups.items())
        ]
        return {
            "requests": self.requests,
            "looked_at": self._looked_at,
            "seconds": self._clock() - self._began,
            "prompts": groups[:_TOLD],
            "findings": [asdict(finding) for finding in self.findings[:_TOLD]],
        }

    @property
    def findings(self) -> list[Finding]:
        """The faults, the dearest first."""
        return sorted(self._findings.values(), key=lambda finding: -finding.lost)

    def _note(self, tenant: str, model: str, fault: Break) -> Finding:
        return self._count(Finding(tenant, model, fault.path, fault.offset, fault.kind), fault.shared, fault.lost)

    def _alias(self, tenant: str, model: str, new: Print, shared: int) -> Finding | None:
        """The same prompt under another name of the model, whose cache does not serve it under this one."""
        for (other_tenant, other), group in self._groups.items():
            if other_tenant != tenant or not same_model(model, other):
                continue
            there = max((shared_length(old, new) for old in group.prints), default=0)
            if there > shared and (there - shared) // CHARS_PER_TOKEN >= MIN_LOST:
                path = " / ".join(sorted((model, other)))
                lost = (there - shared) // CHARS_PER_TOKEN
                return self._count(Finding(tenant, path, "model", 0, "model alias"), shared // CHARS_PER_TOKEN, lost)
        return None

    def _count(self, found: Finding, shared: int, lost: int) -> Finding:
        key = (found.tenant, found.model, found.path, found.kind)
        finding = self._findings.get(key)
        if finding is None:
            if len(self._findings) >= _FINDINGS:
                least = min(self._findings, key=lambda name: self._findings[name].lost)
                del self._findings[least]
            finding = self._findings[key] = found
        finding.seen += 1
        finding.shared += shared
        finding.lost += lost
        return finding


def report(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What all workers have `told`, for the operator: how much of their prompts is shared, by tenant and model, and the
    faults, with the tokens that each costs a day and the change that would mend it.
    """
    told = list(told)
    prompts: dict[tuple[str, str], list[int]] = {}
    findings: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for one in told:
        per_day = one["requests"] / one["looked_at"] / max(60.0, one["seconds"]) * 86_400 if one["looked_at"] else 0.0
        for tenant, model, *counts in one["prompts"]:
            sums = prompts.setdefault((tenant, model), [0, 0, 0])
            prompts[tenant, model] = [a + b for a, b in zip(sums, counts, strict=True)]
        for found in one["findings"]:
            key = (found["tenant"], found["model"], found["path"], found["kind"])
            line = findings.setdefault(key, {**found, "seen": 0, "shared": 0, "lost": 0, "lost_per_day": 0})
            for name in ("seen", "shared", "lost"):
                line[name] += found[name]
            line["lost_per_day"] += int(found["lost"] * per_day)
    return {
        "requests": sum(one["requests"] for one in told),
        "looked_at": sum(one["looked_at"] for one in told),
        "prompts": [
            {
                "tenant": tenant,
                "model": model,
                "looked_at": count,
                "tokens": size // CHARS_PER_TOKEN // count,
                "shared": round(reused / size, 4) if size else 0.0,
            }
            for (tenant, model), (count, size, reused) in prompts.items()
        ],
        "findings": [
            {**line, "mend": MEND[line["kind"]]} for line in sorted(findings.values(), key=lambda line: -line["lost"])
        ],
    }
