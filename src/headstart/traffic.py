"""Traffic: who asked when, how long the texts were, and how well drafters foretold them. Plain data in a file of JSON Lines.

A trace is *recorded* while an engine runs, with token ids and the verdicts on what drafters proposed, and no text; or
*synthetic*: lengths, and how often each drafter would be right. Either kind can be replayed without a model
(`headstart simulate`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import BadInput

VERSION = 1
MOST_TOKENS = 1 << 24  # of one text


@dataclass(frozen=True)
class Skill:
    """How good a drafter is at one text."""

    right: tuple[tuple[float, float], ...]  # (from which share of the text on, chance that a node is right)
    found: float = 1.0  # how often it proposes anything
    spread: float = 0.0  # how far single nodes are better or worse than that
    sure: float = 1.0  # a confidence is the node's own chance to the power of this; below 1: too sure of itself


@dataclass(frozen=True)
class Seen:
    """What became of one draft, in a run that was recorded."""

    position: int  # tokens of the answer that stood before it
    right: tuple[bool, ...]  # depth by depth, as far as the text tells
    confidence: tuple[float, ...] = ()  # how sure the drafter was of the first candidates, depth by depth


@dataclass(frozen=True)
class Arrival:
    """One request of a trace. Token ids are there where it was recorded, skills where it was made up."""

    arrival: float  # seconds from the beginning
    prompt: int
    output: int
    skills: Mapping[str, Skill] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    seen: Mapping[str, tuple[Seen, ...]] = field(default_factory=dict)

    @property
    def is_recorded(self) -> bool:
        return bool(self.output_ids)


@dataclass(frozen=True)
class Trace:
    requests: tuple[Arrival, ...]
    seed: int = 0
    title: str = ""

    @property
    def tokens(self) -> int:
        return sum(r.output for r in self.requests)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Of whom it tells anything."""
        return tuple(sorted({name for r in self.requests for name in (*r.skills, *r.seen)}))


# ------------------------------------------------------------------ files
def header(seed: int = 0, title: str = "") -> str:
    """The first line of a file."""
    return json.dumps({"headstart_trace": VERSION, "seed": seed, "title": title})


def to_line(request: Arrival) -> str:
    out: dict[str, Any] = {"arrival": round(request.arrival, 6)}
    if request.is_recorded:
        out |= {"prompt_ids": request.prompt_ids, "output_ids": request.output_ids}
        out["seen"] = {name: [_to_row(s) for s in seen] for name, seen in request.seen.items()}
    else:
        out |= {"prompt": request.prompt, "output": request.output}
        out["skills"] = {name: _to_skill(s) for name, s in request.skills.items()}
    return json.dumps(out, separators=(",", ":"))


def _to_row(seen: Seen) -> list[Any]:
    row: list[Any] = [seen.position, [int(r) for r in seen.right]]
    return [*row, [round(c, 4) for c in seen.confidence]] if seen.confidence else row


def _to_skill(skill: Skill) -> dict[str, Any]:
    return {"right": skill.right, "found": skill.found, "spread": skill.spread, "sure": skill.sure}


def write_trace(path: str | Path, trace: Trace) -> None:
    lines = [header(trace.seed, trace.title), *(to_line(r) for r in trace.requests)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_trace(path: str | Path) -> Trace:
    """Whatever `write_trace` or a recording wrote. A last line without an end was cut off by a kill, and is left out."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The trace {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    lines = text.split("\n")[:-1]  # behind the last end of a line: nothing, or a piece
    first = _parse(path, 1, lines[0]) if lines else {}
    if first.get("headstart_trace") != VERSION:
        raise BadInput(f"{path}, line 1: this is no trace of version {VERSION}, which begins with {header()}.")
    rows = [_read_line(path, number, line) for number, line in enumerate(lines[1:], 2) if line.strip()]
    if not rows:
        raise BadInput(f"The trace {path} holds no request.")
    seed = first.get("seed", 0)
    rows.sort(key=lambda r: r.arrival)
    return Trace(tuple(rows), seed if isinstance(seed, int) else 0, str(first.get("title", "")))


def _parse(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadInput(f"{path}, line {number}: this is no JSON object.")
    return found


def _read_line(path: str | Path, number: int, line: str) -> Arrival:
    found = _parse(path, number, line)
    try:
        return _recorded(found) if "output_ids" in found else _made_up(found)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadInput(f"{path}, line {number}: this is no request of a trace ({what}).") from None


def _recorded(found: Mapping[str, Any]) -> Arrival:
    prompt, output = (tuple(_whole(t, "a token") for t in found[key]) for key in ("prompt_ids", "output_ids"))
    if not prompt or not output:
        raise ValueError("prompt_ids and output_ids hold one token at least")
    seen = {str(name): tuple(_seen(row) for row in rows) for name, rows in found.get("seen", {}).items()}
    return Arrival(_seconds(found["arrival"]), len(prompt), len(output), {}, prompt, output, seen)


def _seen(row: Any) -> Seen:
    sure = tuple(_share(c, "a confidence") for c in row[2]) if len(row) > 2 else ()
    return Seen(_whole(row[0], "a position"), tuple(bool(_whole(r, "a verdict")) for r in row[1]), sure)


def _made_up(found: Mapping[str, Any]) -> Arrival:
    prompt, output = (_whole(found[key], key, 1) for key in ("prompt", "output"))
    skills = {str(name): _skill(s) for name, s in found.get("skills", {}).items()}
    return Arrival(_seconds(found["arrival"]), prompt, output, skills)


def _skill(found: Mapping[str, Any]) -> Skill:
    right = tuple((_share(at, "a place"), _share(chance, "a chance")) for at, chance in found["right"])
    if not right:
        raise ValueError("right holds one chance at least")
    spread, sure = _share(found.get("spread", 0.0), "spread"), float(found.get("sure", 1.0))
    if not 0 < sure < 100:
        raise ValueError("sure is a number above 0")
    return Skill(right, _share(found.get("found", 1.0), "found"), spread, sure)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError("arrival is a number of seconds")
    return float(value)


def _share(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{what} is a number from 0 to 1")
    return float(value)


def _whole(value: Any, what: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST_TOKENS:
        raise ValueError(f"{what} is a whole number from {least} on")
    return value


# ------------------------------------------------------------------ made up
LOADS = ("single", "steady", "bursts", "ramp", "short", "crowd")
KINDS: Mapping[str, Mapping[str, tuple[float, float, float]]] = {  # found, and the range of chances, by drafter
    "copying": {"ngram": (0.95, 0.80, 0.99), "suffix": (0.95, 0.85, 0.99), "": (1.0, 0.60, 0.95)},
    "code": {"ngram": (0.60, 0.40, 0.85), "suffix": (0.65, 0.45, 0.90), "": (1.0, 0.55, 0.90)},
    "prose": {"ngram": (0.25, 0.05, 0.45), "suffix": (0.30, 0.10, 0.50), "": (1.0, 0.30, 0.80)},
    "noise": {"ngram": (0.30, 0.00, 0.10), "suffix": (0.35, 0.00, 0.10), "": (1.0, 0.00, 0.30)},
}
LEAST_TOKENS = 800  # of a trace: what is learned at the beginning is paid for over some text


def synthesise(seed: int, tick: float = 0.02, drafters: Iterable[str] = ("ngram", "suffix", "eagle3")) -> Trace:
    """A random load pattern of random texts. `tick` is how long a plain step of one request takes: arrivals are counted in
    it, so that the same pattern is as busy on a fast machine as on a slow one."""
    rng = random.Random(seed)
    load = rng.choice(LOADS)
    mix = rng.sample(sorted(KINDS), rng.choice((1, 1, 2, 3)))
    mood = rng.uniform(-0.15, 0.15)  # all drafters are better or worse on this traffic than elsewhere
    requests = []
    for at, prompt, output in _load(rng, load):
        kind = rng.choice(mix)
        skills = {name: _draw_skill(rng, kind, name, mood) for name in drafters}
        requests.append(Arrival(round(at * tick, 6), prompt, output, skills))
    requests.sort(key=lambda r: r.arrival)
    return Trace(tuple(requests), seed, f"{load}, {' and '.join(mix)}")


def _load(rng: random.Random, load: str) -> list[tuple[float, int, int]]:
    """(arrival in ticks, prompt, output) of each request."""
    if load == "single":
        return [(0.0, rng.randint(20, 2000), rng.randint(LEAST_TOKENS, 2 * LEAST_TOKENS))]
    usual = rng.randint(15, 60) if load == "short" else rng.randint(60, 300)
    count = rng.randint(LEAST_TOKENS, 3 * LEAST_TOKENS) // usual + 1
    gap = usual * rng.uniform(0.05, 1.5)  # below `usual`, requests overlap
    at, out = 0.0, []
    for i in range(count):
        out.append((at, rng.randint(10, 600), max(4, int(rng.lognormvariate(0.0, 0.4) * usual))))
        at += _gap(rng, load, gap, i, count)
    return out


def _gap(rng: random.Random, load: str, gap: float, i: int, count: int) -> float:
    """Ticks until the next request."""
    if load == "crowd":
        return 0.0
    if load == "bursts":
        return 0.0 if rng.random() < 0.8 else 5 * gap
    if load == "ramp":
        return gap * 2 * (1 - i / count)
    return rng.expovariate(1 / gap)


def _draw_skill(rng: random.Random, kind: str, name: str, mood: float) -> Skill:
    """It stays, drifts, or turns in the middle of the text."""
    found, low, high = KINDS[kind].get(name) or KINDS[kind][""]

    def chance() -> float:
        return round(min(0.99, max(0.0, rng.uniform(low, high) + mood)), 4)

    how, first = rng.choice(("stays", "stays", "drifts", "turns")), chance()
    right: tuple[tuple[float, float], ...] = ((0.0, first),)
    if how == "drifts":
        last = chance()
        right = tuple((i / 8, round(first + (last - first) * i / 7, 4)) for i in range(8))
    elif how == "turns":
        other = rng.choice(sorted(KINDS))
        _, low, high = KINDS[other].get(name) or KINDS[other][""]
        right = ((0.0, first), (round(rng.uniform(0.2, 0.8), 3), chance()))
    return Skill(right, found, round(rng.uniform(0.0, 0.4), 3), round(rng.choice((1.0, rng.uniform(0.5, 1.5))), 3))
