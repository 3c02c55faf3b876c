"""What a benchmark writes down: a sample for each request, a lap for each round of a method. All else follows from these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headstart.bench import typed
from headstart.errors import BadInput, parse_json

BASELINE = "none"  # the method that all others are compared with
FORMAT = 1  # of the file


@dataclass(frozen=True)
class Point:
    """One setting in which methods are compared."""

    concurrency: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.concurrency} at once, temperature {self.temperature:g}"


@dataclass
class Counts:
    """What speculation did. None: the engine does not tell."""

    steps: int | None = None  # target forwards
    drafts: int | None = None
    drafted: int | None = None  # tokens
    accepted: int | None = None
    by_position: list[int] | None = None  # drafts of which at least so many tokens were accepted
    draft_seconds: float | None = None
    target_seconds: float | None = None

    @staticmethod
    def total(many: list[Counts]) -> Counts:
        """A sum is known where all of its parts are."""

        def add(name: str) -> Any:
            values = [getattr(one, name) for one in many]
            return None if not values or any(value is None for value in values) else sum(values)

        own = [one.by_position for one in many]
        positions: list[int] | None = None
        if own and all(one is not None for one in own):
            deepest = max((len(one) for one in own if one), default=0)
            positions = [sum(one[i] for one in own if one and i < len(one)) for i in range(deepest)]
        names = [f.name for f in fields(Counts) if f.name != "by_position"]
        return Counts(by_position=positions, **{name: add(name) for name in names})


@dataclass
class Sample:
    """One request."""

    method: str
    concurrency: int
    temperature: float
    round: int
    prompt: str  # its id
    category: str
    prompt_tokens: int
    tokens: int  # of the answer
    seconds: float  # from asking to the last token
    first_seconds: float  # to the first
    first_tokens: int = 1  # that came with it
    text: str = ""
    token_ids: list[int] | None = None  # None: the engine tells text alone
    counts: Counts = field(default_factory=Counts)
    error: str | None = None  # why there is no answer

    @property
    def point(self) -> Point:
        return Point(self.concurrency, self.temperature)

    @property
    def key(self) -> tuple[Point, str]:
        """What the same request of another method or round shares with it."""
        return self.point, self.prompt


@dataclass
class Lap:
    """All prompts once with one method, at one point."""

    method: str
    concurrency: int
    temperature: float
    round: int
    seconds: float  # from the first request to the end of the last
    tokens: int
    load: float | None = None  # average of the machine, at its beginning
    memory: int | None = None  # most bytes that were held
    joules: float | None = None
    counts: Counts | None = None  # of an engine that tells sums, and not of each request

    @property
    def point(self) -> Point:
        return Point(self.concurrency, self.temperature)


@dataclass
class Difference:
    """Where an answer parts from the baseline's."""

    method: str
    concurrency: int
    temperature: float
    prompt: str
    at: int  # tokens that are the same, or characters where tokens are not told
    margin: float | None = None  # between the two tokens, in log p of the target; None: not known
    near_tie: bool | None = None  # rounding alone explains it

    @property
    def point(self) -> Point:
        return Point(self.concurrency, self.temperature)


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A file in the same folder, which is made; that it cannot be written is one sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path.with_suffix(".tmp")
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror or error}. Give another folder.") from error


@dataclass
class Result:
    """One run of a benchmark."""

    provenance: dict[str, Any]  # commit, versions, machine, when, how it was called
    setting: dict[str, Any]  # model, engine, workload, tokens of an answer, rounds
    methods: dict[str, dict[str, Any]]  # by name, in order: what is known of each
    samples: list[Sample] = field(default_factory=list)
    laps: list[Lap] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    roofline: dict[str, Any] | None = None

    def points(self) -> list[Point]:
        return sorted({lap.point for lap in self.laps}, key=lambda p: (p.temperature, p.concurrency))

    def of(self, method: str, point: Point) -> list[Sample]:
        """Those that were answered."""
        return [s for s in self.samples if s.method == method and s.point == point and s.error is None]

    def laps_of(self, method: str, point: Point) -> Iterator[Lap]:
        return (lap for lap in self.laps if lap.method == method and lap.point == point)

    def save(self, path: Path) -> None:
        """All of it or nothing: a run that is stopped while it writes leaves the file of before."""
        with written_beside(path) as beside:
            beside.write_text(json.dumps({"format": FORMAT} | asdict(self)) + "\n", encoding="utf-8")
            beside.replace(path)

    @staticmethod
    def load(path: Path) -> Result:
        """A user's file: whatever is wrong with it is one sentence."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be read: {error}. Give a file that `headstart bench` wrote.") from error
        kept = parse_json(text, str(path))
        if not isinstance(kept, dict) or kept.pop("format", None) != FORMAT:
            raise BadInput(f"{path} is no result of `headstart bench`, or one of another version.")
        try:
            return typed.read(Result, kept)
        except typed.Misfit as misfit:
            raise BadInput(f"{path} is a damaged result: {misfit}.") from None
