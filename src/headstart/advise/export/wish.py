"""What is wanted of an engine, and what comes of it: plain data that every engine's module reads and makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from headstart.advise.check import Report
from headstart.advise.facts import GGUF, Facts
from headstart.config import SpeculativeConfig

ASKED = "as asked"
SERVING = (
    "host",
    "port",
    "max_model_len",
    "max_num_seqs",
    "dtype",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "draft_tensor_parallel_size",
)


@dataclass(frozen=True)
class Model:
    """A target, a draft model or a head."""

    name: str  # as the user said it
    facts: Facts | None = None  # None: it is not on this machine

    @property
    def place(self) -> str:
        """As another program finds it: a path, or a hub's name."""
        if self.facts is not None and self.facts.form == GGUF:
            return str(self.facts.path.absolute())
        path = Path(self.name).expanduser()
        return str(path.absolute()) if self.facts is not None and path.exists() else self.name

    @property
    def short(self) -> str:
        """What people call it."""
        return Path(self.name.rstrip("/")).name or self.name


@dataclass(frozen=True)
class Serving:
    """What is asked of the server itself. None: as the engine has it."""

    host: str | None = None
    port: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    draft_tensor_parallel_size: int | None = None


@dataclass(frozen=True)
class Wish:
    target: Model
    drafter: Model | None = None  # a draft model or a head
    config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    given: Mapping[str, Any] = field(default_factory=dict)  # what was said of `config`, by its names
    extra: Mapping[str, Any] = field(default_factory=dict)  # what was said that only vLLM knows
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a value of `config` is what it is
    serving: Serving = field(default_factory=Serving)
    version: tuple[int, ...] | None = None  # of the engine; None: the newest that is known here
    folder: str = "."  # where its files will lie
    notes: tuple[str, ...] = ()  # what has to be said already

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def speculates(self) -> bool:
        return self.method != "none"

    @property
    def tokens(self) -> int:
        return self.config.num_speculative_tokens

    @property
    def another_vocabulary(self) -> bool:
        """The draft model's matrices have another number of rows than the target's."""
        draft = self.drafter.facts if self.drafter is not None else None
        sizes = {m.vocab_size for m in (self.target.facts, draft) if m is not None and not m.head}
        return self.method == "draft_model" and len(sizes) > 1

    def why(self, name: str) -> str:
        return self.reasons.get(name, ASKED)

    def file(self, name: str) -> str:
        """The path of one of its files."""
        return str(Path(self.folder) / name)


@dataclass(frozen=True)
class Setting:
    """One value under an engine's own name for it, and why. A list of settings is a section."""

    name: str
    value: Any
    why: str = ""


@dataclass(frozen=True)
class Exported:
    files: tuple[tuple[str, str], ...]  # name and text
    command: tuple[str, ...]  # that starts it, or makes it known
    notes: tuple[str, ...] = ()  # what could not be said, and what else is good to know


@dataclass(frozen=True)
class Engine:
    title: str
    methods: Mapping[str, str]  # ours, and what it calls them
    says: frozenset[str]  # names of the config and of `Serving` that it has a word for
    write: Callable[[Wish], Exported]
    rules: str = ""  # of check, those that it goes by
    objections: Callable[[Report], list[str]] = lambda report: []  # where check has no rules for it
    lacks: Mapping[str, str] = field(default_factory=dict)  # why there is no word, where that helps
    versions: bool = False  # its spelling depends on its version

    def unsaid(self, wish: Wish) -> list[str]:
        """What was asked for and has no word here."""
        asked: dict[str, Any] = {n: v for n, v in wish.given.items() if n not in ("method", "model")}
        asked |= {n: getattr(wish.serving, n) for n in SERVING if getattr(wish.serving, n) is not None} | dict(
            wish.extra
        )
        return [
            f"{self.title} has no word for {name}={shown(value)}"
            + (f": {self.lacks[name]}." if name in self.lacks else ".")
            for name, value in asked.items()
            if name not in self.says and value not in (False, None, ())
        ]


def shown(value: Any) -> str:
    return str([list(row) for row in value]) if isinstance(value, tuple) else str(value)


def asked(wish: Wish, names: Mapping[str, str]) -> list[Setting]:
    """What was said of the server, under the engine's names."""
    found = ((theirs, getattr(wish.serving, ours)) for ours, theirs in names.items())
    return [Setting(theirs, value, ASKED) for theirs, value in found if value is not None]


def steps(rows: Sequence[tuple[int, int, int]], most: int) -> list[tuple[int, int, int]]:
    """A schedule without gaps and overlaps, from one request on; where it says nothing, the most is drafted."""
    edges = sorted({1, *(low for low, _, _ in rows), *(high + 1 for _, high, _ in rows)})
    out: list[tuple[int, int, int]] = []
    for low, behind in pairwise(edges):
        tokens = min([most, *(k for a, b, k in rows if a <= low <= b)])
        if out and out[-1][2] == tokens:
            out[-1] = (out[-1][0], behind - 1, tokens)
        else:
            out.append((low, behind - 1, tokens))
    return out


# ------------------------------------------------------------------ rules of engines that check does not know
def one_vocabulary(report: Report, title: str) -> list[str]:
    relation = report.relation
    if relation is None or not relation.differing:
        return []
    return [f"{title} drafts with the target's ids, and {relation.differing:,} of them stand for other tokens."]


def only_forms(report: Report, title: str, unread: Mapping[str, str]) -> list[str]:
    """Of weights, those that it does not read: by the file's form or by how they are quantised."""
    models = [(m, m.form if m.form in unread else str(m.quantized)) for m in report.pair.models]
    return [f"{m.name} is {unread[form]}, which {title} does not read." for m, form in models if form in unread]
