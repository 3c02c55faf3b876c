"""The vocabulary: plain data that flows through a step. Knows no tensors' contents, no model, no engine.

Shape letters, used in every file:
    B requests in a step      T new tokens in one forward, all requests packed     N draft nodes
    R rows of logits asked    V vocabulary     S slots of the KV pool     L layers     H query heads
    K key/value heads         D head size
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from headstart.errors import BadInput, nearest

if TYPE_CHECKING:
    import torch

PENDING = -1  # stands for a token that the device has chosen and the host does not know yet
NOTHING = np.empty(0, np.int64)  # no slots
_ids = itertools.count()


# ------------------------------------------------------------------ what a user asks for
@dataclass(frozen=True)
class StructuredOutputs:
    """The form that an answer must have, one of these. Names are vLLM's."""

    json: str | None = None  # a JSON schema; may be given as an object
    regex: str | None = None
    choice: tuple[str, ...] | None = None  # one of these texts
    grammar: str | None = None  # in Lark's notation or in llama.cpp's GBNF
    json_object: bool = False  # any JSON object

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", json.dumps(self.json, sort_keys=False))
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        if len(self._given) != 1:
            said = f"{' and '.join(self._given)} were given" if self._given else "none was given"
            raise BadInput(f"structured_outputs take one of {', '.join(f.name for f in fields(self))}; {said}.")
        fine = isinstance(self.choice, tuple) and self.choice and all(isinstance(t, str) and t for t in self.choice)
        if self.kind == "choice" and not fine:
            raise BadInput("structured_outputs.choice should be a list of non-empty texts.")
        if self.kind == "json_object" and self.json_object is not True:
            raise BadInput("structured_outputs.json_object should be true.")
        if self.kind in ("json", "regex", "grammar") and not isinstance(getattr(self, self.kind), str):
            raise BadInput(f"structured_outputs.{self.kind} should be a text{' or an object' * (self.kind == 'json')}.")

    def _says(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not (name == "json_object" and value is False)

    @property
    def _given(self) -> list[str]:
        return [f.name for f in fields(self) if self._says(f.name)]

    @property
    def kind(self) -> str:
        return self._given[0]

    @staticmethod
    def of(value: Any) -> Any:
        """From an object with these names; what is none stays, and is refused by name."""
        if not isinstance(value, Mapping):
            return value
        known = {f.name for f in fields(StructuredOutputs)}
        for key in value:
            if key not in known:
                raise BadInput(f"Unknown option {key!r} of structured_outputs.{nearest(key, known)}")
        return StructuredOutputs(**value)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings are vLLM's; `temperature=0` is greedy."""

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] | list[str] = ()
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: tokens alone, without text
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        for name, ok, expected in self._rules():
            if not ok:
                raise BadInput(f"{name}={getattr(self, name)!r} is not usable: expected {expected}.")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """(name, is it fine?, what was expected), one after the other: a later rule may rely on the earlier ones."""
        yield "n", _whole(self.n, 1, 256), "a whole number from 1 to 256"
        yield "max_tokens", _whole(self.max_tokens, 1), "a whole number of at least 1"
        yield "min_tokens", _whole(self.min_tokens, 0, self.max_tokens), "a whole number from 0 to max_tokens"
        yield "temperature", _real(self.temperature, 0, 1e4), "0 (greedy) or a positive number"
        yield "top_k", _whole(self.top_k, -1), "0 or -1 (off), or a positive whole number"
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            yield name, _real(value, 0, 1) and value > 0, "a number above 0, at most 1"
        yield "min_p", _real(self.min_p, 0, 1), "a number from 0 to 1"
        positive = _real(self.repetition_penalty, 0, 1e4) and self.repetition_penalty > 0
        yield "repetition_penalty", positive, "a positive number"
        for name in ("presence_penalty", "frequency_penalty"):
            yield name, _real(getattr(self, name), -2, 2), "a number from -2 to 2"
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            fine = isinstance(value, tuple) and all(isinstance(s, str) and s for s in value)
            yield name, fine, "non-empty strings"
        yield "detokenize", self.detokenize or not self.stop, "True, as stop strings are found in the text"
        ids = self.stop_token_ids
        yield "stop_token_ids", isinstance(ids, tuple) and all(_whole(t, 0) for t in ids), "a list of token ids"
        bias = self.logit_bias
        fine = bias is None or (isinstance(bias, dict) and all(_real(v, -1e9, 1e9) for v in bias.values()))
        yield "logit_bias", fine, "token ids with finite numbers"
        for name in ("logprobs", "prompt_logprobs"):
            yield name, getattr(self, name) is None or _whole(getattr(self, name), 0), "None, 0 or more"
        yield "seed", self.seed is None or _whole(self.seed), "None or a whole number"
        form = self.structured_outputs
        yield (
            "structured_outputs",
            isinstance(form, (StructuredOutputs, type(None))),
            "an object such as {'regex': '[0-9]+'}",
        )
        yield "ignore_eos", not (form and self.ignore_eos), "False, as structured_outputs say where a text ends"

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def truncates(self) -> bool:
        """Are unlikely tokens left out, by rank or by sums of probabilities?"""
        return self.top_k > 0 or self.top_p < 1 or self.typical_p < 1


def _whole(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _real(value: Any, low: float, high: float) -> bool:
    """A finite number in this range; NaN is in none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _as_tuple(value: Any) -> Any:
    """One string is one item; None is no item; what is no list stays, and is refused by name."""
    if isinstance(value, str):
        return (value,)
    return tuple(value or ()) if isinstance(value, (list, tuple, type(None))) else value


def _as_bias(value: Any) -> Any:
    """Token ids may come as text, as JSON has them."""
    if not isinstance(value, Mapping):
        return value
    try:
        return {int(k): float(v) for k, v in value.items()}
    except (TypeError, ValueError):
        return dict.fromkeys(map(str, value), None)  # refused by name


# ------------------------------------------------------------------ what the engine keeps of it
@dataclass
class Stats:
    """What speculation did for one request. Times are seconds of the steps that this request took part in."""

    steps: int = 0  # target forwards that produced tokens for this request
    tokens: int = 0  # tokens produced
    drafts: int = 0  # non-empty drafts
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    by_drafter: dict[str, list[int]] = field(default_factory=dict)  # name -> [drafted, accepted]
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    time_queue: float = 0.0
    time_draft: float = 0.0
    time_target: float = 0.0
    time_verify: float = 0.0
    time_host: float = 0.0
    time_policy: float = 0.0
    time_compared: float = 0.0  # of steps of which it is known what plain ones take,
    time_plain: float = 0.0  # and what plain ones would have taken for the same tokens
    time_to_first_token: float = 0.0
    first_tokens: int = 0  # that came with the first one, from the same step
    time_total: float = 0.0

    @property
    def block_efficiency(self) -> float:
        """τ: tokens produced per target forward."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """α: accepted ÷ drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts whose i-th token was accepted."""
        return [a / self.drafts for a in self.accepted_by_position] if self.drafts else []

    @property
    def wasted(self) -> float:
        """Share of the rows of its forwards that brought no token."""
        rows = self.steps + self.drafted
        return (self.drafted - self.accepted) / rows if rows else 0.0

    @property
    def speedup_estimate(self) -> float | None:
        """Against plain steps as this engine has measured them; None where it has not."""
        return self.time_plain / self.time_compared if self.time_compared > 0 else None

    @property
    def decode_tokens_per_second(self) -> float:
        """After the first step: its tokens and its time, the prefill's, are left out."""
        seconds, tokens = self.time_total - self.time_to_first_token, self.tokens - self.first_tokens
        return tokens / seconds if seconds > 0 and tokens > 0 else 0.0

    def record(self, origins: Sequence[str], accepted: Sequence[int]) -> None:
        """One verdict of this request: where each node of its draft came from, and which were accepted."""
        self.steps += 1
        if not origins:
            return
        num_accepted, num_drafted, by_position = len(accepted), len(origins), self.accepted_by_position
        self.drafts += 1
        self.drafted += num_drafted
        self.accepted += num_accepted
        if num_accepted > len(by_position):
            by_position += [0] * (num_accepted - len(by_position))
        for i in range(num_accepted):
            by_position[i] += 1
        if origins.count(origins[0]) == num_drafted:  # as mostly
            book = self.by_drafter.setdefault(origins[0], [0, 0])
            book[:] = book[0] + num_drafted, book[1] + num_accepted
            return
        for name in origins:
            self.by_drafter.setdefault(name, [0, 0])[0] += 1
        for node in accepted:
            self.by_drafter[origins[node]][1] += 1

    @staticmethod
    def total(many: Sequence[Stats]) -> Stats:
        """Several answers as one."""
        names = (
            "steps", "tokens", "drafts", "drafted", "accepted", "prompt_tokens", "time_total", "time_compared", "time_plain",
        )  # fmt: skip
        columns = itertools.zip_longest(*(s.accepted_by_position for s in many), fillvalue=0)
        sums = {name: sum(getattr(s, name) for s in many) for name in names}
        return Stats(accepted_by_position=[sum(column) for column in columns], **sums)

    def copy(self) -> Stats:
        """As they are now; the engine goes on counting in its own."""
        out = Stats.__new__(Stats)  # one for each piece of text: copy.copy takes far longer
        out.__dict__.update(self.__dict__)
        out.accepted_by_position = list(self.accepted_by_position)
        out.by_drafter = {name: list(book) for name, book in self.by_drafter.items()}
        return out

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        derived = (
            "block_efficiency", "acceptance_rate", "acceptance_by_position", "decode_tokens_per_second", "wasted",
            "speedup_estimate",
        )  # fmt: skip
        return plain | {name: getattr(self, name) for name in derived}


class Form(Protocol):
    """What one answer may go on with, see `grammar`."""

    broken: str | None  # why it could not be followed to the end

    def allowed(self, answer: Sequence[int], path: Sequence[int] = ()) -> np.ndarray | None: ...
    def prune(self, answer: Sequence[int], draft: Tree) -> Tree: ...


@dataclass(frozen=True)
class RequestSpeculation:
    """What one request may say about speculation; None leaves the engine's own setting."""

    enabled: bool = True
    method: str | None = None
    max_tokens: int | None = None
    verification: str | None = None


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine. `tokens` is prompt then output; `computed` positions lie in KV."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    id: str = ""
    eos_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    form: Form | None = None  # what the answer may go on with
    speculation: RequestSpeculation = RequestSpeculation()
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    arrived: float = 0.0
    streams: bool = True  # somebody reads along; else its text is made at the end, at once
    shows_drafts: bool = False  # and wants to see what was drafted
    space: int = 0  # KV is shared within one: a drafter that keeps its own beside the target's needs to have read it,
    unread: int | None = None  # or knows that it has not, from this token on
    booked: tuple[float, ...] | None = None  # seconds that the engine had counted when they were last told to `stats`
    limit: int = 0  # how long its text may become, in an engine

    def __post_init__(self) -> None:
        self.id = self.id or f"r{next(_ids)}"
        self.tokens = self.tokens or list(self.prompt)
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @functools.cached_property
    def changes_logits(self) -> bool:
        """Do penalties, a bias, bad words or a form change what the model says, at every place?"""
        p = self.params
        penalties = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        return bool(p.logit_bias or self.bad_word_ids or penalties or self.form is not None)

    @functools.cached_property
    def can_be_chosen(self) -> bool:
        """Do temperature, noise, top-k, top-p and min-p alone make a token of its logits?"""
        return not self.changes_logits and (self.params.greedy or self.params.typical_p >= 1)

    @functools.cached_property
    def keeps_all(self) -> bool:
        """Is no unlikely token left out?"""
        p = self.params
        return p.greedy or not (p.truncates or p.min_p > 0)

    @functools.cached_property
    def manner(self) -> np.ndarray:
        """(6,) how it chooses: temperature, top-k (0: off), top-p, min-p, and the two words of its seed"""
        p, (high, low) = self.params, divmod(self.seed % (1 << 64), 1 << 32)
        return np.array([p.temperature, min(max(p.top_k, 0), 1 << 30), p.top_p, p.min_p, low, high])

    @functools.cached_property
    def simple(self) -> bool:
        """Can a runner that chooses always choose its tokens, and does nobody ask for more than these?"""
        p = self.params
        quiet = p.logprobs is None and p.prompt_logprobs is None
        return quiet and not p.min_tokens and self.can_be_chosen and self.keeps_all

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the text."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | self.eos_ids


# ------------------------------------------------------------------ what flows inside a step
@dataclass(slots=True)
class Tree:
    """One request's draft: node i holds `tokens[i]` and hangs under node `parents[i]` (-1: under the last token).

    Parents stand before their children; siblings stand in the order in which they were proposed.
    `logq_rows[i]` is the row of `Draft.logq` that node i was drawn from, for drafters that know q. `kinds[i]` is what the
    drafter says of node i: a small number, and nodes of one kind are about equally likely. How likely, a policy learns.
    `confidence[i]` is how sure the drafter itself is of node i, given that its parent is right. `origins[i]` names the
    drafter that node i came from.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    logq_rows: list[int] | None = None
    kinds: list[int] | None = None
    confidence: list[float] | None = None
    origins: list[str] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def chain(tokens: Sequence[int]) -> Tree:
        return Tree(list(tokens), list(range(-1, len(tokens) - 1)))

    def copy(self) -> Tree:
        """With lists of its own."""
        own = (getattr(self, f.name) for f in fields(self))
        return Tree(*(list(value) if value is not None else None for value in own))  # type: ignore[arg-type]


@dataclass
class Mail:
    """Tokens of a draft that was not waited for: where they will lie on the device, and how to wait for them."""

    device: torch.Tensor  # (M,) int32
    index: np.ndarray  # (N,) where each node's token is among them
    wait: Callable[[], Sequence[Tree]]  # the drafts, as they turned out
    sizes: np.ndarray | None = None  # (B,) where it says how many of a draft's tokens there are; None: all
    parents: np.ndarray | None = None  # (B,) where it says the parents of a tree's nodes; None: as the draft says
    depth: int | None = None  # of the deepest node that there may be; None: as the draft says


@dataclass
class Draft:
    """A drafter's answer to one view: the trees of B requests, laid end to end."""

    tokens: np.ndarray  # (N,) int64
    parents: np.ndarray  # (N,) int64, within the request, -1 = the request's last token
    offsets: np.ndarray  # (B+1,) int64
    logq: torch.Tensor | None = None  # (Q, V) log-distributions that nodes were drawn from
    logq_rows: np.ndarray | None = None  # (N,) row of logq for each node
    mail: Mail | None = None  # the tokens, where only the device knows them yet; `tokens` is PENDING then
    grown: list[Tree] | None = None  # the same as trees, where it was packed from them

    @staticmethod
    def of(trees: Sequence[Tree], logq: torch.Tensor | None = None) -> Draft:
        """Pack one tree per request."""
        sizes = [len(t) for t in trees]
        flat = [t for tree in trees for t in tree.tokens]
        parents = [p for tree in trees for p in tree.parents]
        rows = None
        if logq is not None:
            rows = np.array([r for t in trees for r in (t.logq_rows or [-1] * len(t))], dtype=np.int64)
        offsets = np.array(list(itertools.accumulate(sizes, initial=0)), dtype=np.int64)
        tokens = np.array(flat, dtype=np.int64)
        grown = list(trees) if all(t.logq_rows is None for t in trees) else None
        return Draft(tokens, np.array(parents, dtype=np.int64), offsets, logq, rows, grown=grown)

    @staticmethod
    def chains(chains: Sequence[Sequence[int]]) -> Draft:
        """Pack one chain per request: all that most drafters need."""
        return Draft.of([Tree.chain(c) for c in chains])

    def trees(self) -> list[Tree]:
        """Unpack, one tree per request."""
        if self.grown is not None:
            return self.grown
        out = []
        for a, b in itertools.pairwise(self.offsets.tolist()):
            rows = [] if self.logq_rows is None else self.logq_rows[a:b].tolist()
            drawn = rows if rows and min(rows) >= 0 else None
            out.append(Tree(self.tokens[a:b].tolist(), self.parents[a:b].tolist(), drawn))
        return out


@dataclass(slots=True)
class Verdict:
    """What the target said about one request's draft: the accepted nodes from the top down, then its own token."""

    accepted: list[int]  # node numbers
    bonus: int

    def tokens(self, tree: Tree) -> list[int]:
        return [tree.tokens[i] for i in self.accepted] + [self.bonus]


@dataclass(slots=True)
class RequestView:
    """What a drafter may see of one request. `tokens` is the live list: read it, never change it."""

    id: str
    tokens: Sequence[int]
    num_prompt: int
    budget: int  # at most so many nodes
    max_depth: int  # deeper nodes could never be used
    params: SamplingParams
    seed: int
    verification: str = "walk"
    request: Request | None = None  # for the sampling rules that a drafter may share with the target
    seat: int = -1  # of its text on the target's device; `tokens` may be behind
    line: int = -1  # its segment of the target's last forward
    held: np.ndarray | None = None  # all slots that the target has for it,
    computed: int = 0  # and how many tokens lie there

    @property
    def slots(self) -> np.ndarray:
        """Of what lies in the target's KV."""
        return NOTHING if self.held is None else self.held[: self.computed]

    @property
    def room(self) -> np.ndarray:
        """Behind them, for its last token and its budget."""
        return NOTHING if self.held is None else self.held[self.computed :]


class Sitter(NamedTuple):
    """A text that needs a seat on the target's device, and how it is sampled."""

    id: str
    tokens: Sequence[int]
    temperature: float = 0.0
    seed: int = 0


class DeviceTexts(Protocol):
    """The texts of running requests where the target's device keeps them, each in a seat of its own."""

    tokens: torch.Tensor  # (seats, width) int32
    lengths: torch.Tensor  # (seats,) int32
    heats: torch.Tensor  # (seats,) float32: temperatures
    seeds: torch.Tensor  # (2, seats) int32: the words of their seeds
    width: int

    def on_device(self, seats: Sequence[int]) -> torch.Tensor:
        """(B,) int32"""
        ...

    def read(self, numbers: torch.Tensor) -> Callable[[], np.ndarray]:
        """Bring numbers to the host; the answer waits for them."""
        ...


@dataclass(frozen=True, eq=False)
class DeviceStep:
    """What the target's last forward left on its device, for drafters that go on from there. Segments are the forward's."""

    hidden: dict[int, torch.Tensor]  # (T, hidden size) of each layer that was asked for
    verdict: torch.Tensor  # int32, for each segment: accepted nodes, the bonus, the nodes
    block: torch.Tensor  # int32: what the forward was given; its first numbers say where things stand in it
    fixed: bool = False  # forwards leave it at the same place every time


@dataclass(slots=True)
class Reading:
    """What the target computed of one request in a step: its tokens [start, start + len(rows)), which lie in KV now."""

    id: str
    tokens: Sequence[int]  # the whole text; the token behind those that were computed is known
    start: int
    rows: Sequence[int]  # of the forward's hidden states, one for each token
    known: int  # how many of these tokens stood before the step's own choice: those of a prompt, and the last one
    slots: np.ndarray  # of the text, up to there
    ends: bool = False  # the text is over, and its KV stays for others to find
    unread: int | None = None  # of what was taken over from others, nobody has read from this token on

    def last(self) -> Reading:
        """Its last token alone."""
        return replace(self, start=self.start + len(self.rows) - 1, rows=self.rows[-1:])


@dataclass
class View:
    """All requests for which one drafter is asked in one step."""

    requests: list[RequestView]
    texts: DeviceTexts | None = None  # where the drafter is to draft on the target's device,
    step: DeviceStep | None = None  # and what the last forward left there


@dataclass(slots=True)
class Segment:
    """One request's share of a packed forward: rows [start, stop).

    It may read `slots`: first `context` that every row sees, then the entries of a tree, of which each row sees its own
    ancestors. The new rows are the last entries; older ones were computed by an earlier forward. `parents` counts
    within the tree (-1: directly behind the context); None means a chain of new rows only. An entry's position is
    context + depth.
    """

    start: int
    stop: int
    context: int
    slots: np.ndarray  # (context + entries,)
    parents: np.ndarray | None = None  # (entries,)
    seat: int = -1  # where the device keeps the request's text, for runners that do
    pages: np.ndarray | None = None  # of the slots, and those behind them that the device may need; None: no others
    moves: bool = False  # the device finds out where the rows stand: the step before may have accepted some tokens
    sized: int = -1  # where the mail says how many draft tokens there are; -1: all
    grown: int = -1  # where the mail says the parents of the draft's nodes; -1: they are as `parents` says

    @property
    def num_new(self) -> int:
        return self.stop - self.start


@dataclass
class Choice:
    """How each of R asked rows chooses its token, and which segments walk down a draft of how many nodes (their last rows).

    Every row is greedy and no segment chooses until somebody says otherwise. What only noise needs is made on first use.
    """

    num_rows: int
    nodes: list[int]  # for each segment; -1: it chooses nothing
    draws: bool = False  # some row has a temperature above 0
    truncates: bool = False  # some row leaves out unlikely tokens

    @staticmethod
    def of(num_rows: int, num_segments: int) -> Choice:
        return Choice(num_rows, [-1] * num_segments)

    @functools.cached_property
    def temperature(self) -> np.ndarray:
        """(R,) 0: greedy"""
        return np.zeros(self.num_rows, np.float32)

    @functools.cached_property
    def seeds(self) -> np.ndarray:
        """(R, 2) words of the seed; a row's noise belongs to this and to the position behind its own"""
        return np.zeros((self.num_rows, 2), np.int64)

    @functools.cached_property
    def top_k(self) -> np.ndarray:
        """(R,) 0: off"""
        return np.zeros(self.num_rows, np.int64)

    @functools.cached_property
    def top_p(self) -> np.ndarray:
        """(R,) 1: off"""
        return np.ones(self.num_rows, np.float32)

    @functools.cached_property
    def min_p(self) -> np.ndarray:
        """(R,) 0: off"""
        return np.zeros(self.num_rows, np.float32)


@dataclass
class Batch:
    """One forward. Prefill pieces and draft trees look the same here.

    With `stops`, the last tokens are PENDING: each is the likeliest one after the token before it, up to one of these.
    `source[t]` is -1 where `tokens[t]` holds; r >= 0: the token that row r of the last forward chose; -2, -3, ...: mail[0],
    mail[1], ...
    """

    tokens: np.ndarray  # (T,)
    positions: np.ndarray  # (T,)
    segments: list[Segment]
    rows: np.ndarray  # (R,) rows whose logits are asked
    hidden_layers: tuple[int, ...] = ()
    layers: int | None = None  # only so many of the model's layers, then its way out; None: all
    source: np.ndarray | None = None  # (T,) where a token is that the host does not know
    mail: torch.Tensor | None = None  # (M,) int32, tokens on the device
    behind: np.ndarray | None = None  # (T,) the token behind each row that a head reads, -1 elsewhere: `Runner.reader`
    choice: Choice | None = None  # for runners that choose tokens themselves
    stops: frozenset[int] | None = None  # what ends a run of PENDING tokens, for runners that run on

    @property
    def write_slots(self) -> np.ndarray:
        """(T,) the slot of each new row."""
        own = [s.slots[len(s.slots) - s.num_new :] for s in self.segments]
        return own[0] if len(own) == 1 else np.concatenate(own)


class Landing(Protocol):
    """Verdicts on their way from the device. `device[b]` is (number accepted, bonus, ...) there, until the next forward."""

    device: torch.Tensor

    @property
    def has_landed(self) -> bool:
        """Need nobody wait any more?"""
        ...

    def verdicts(self) -> list[Verdict | None]:
        """One for each segment, None where the host has to decide; waits for the device."""
        ...


@dataclass
class Forward:
    """What a runner returns: lines of logits, and the hidden states asked for, each (T, hidden size).

    `rows` says which lines were asked, where more were computed. `landing` comes from runners that choose themselves, `ran`
    from those that ran on. Tensors may be overwritten by the runner's next forward.
    """

    lines: torch.Tensor
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: np.ndarray | slice | None = None
    landing: Landing | None = None
    ran: list[int] | None = None  # the tokens that were chosen, where the runner ran on

    @functools.cached_property
    def logits(self) -> torch.Tensor:
        """(R, V)"""
        return self.lines if self.rows is None else self.lines[self.rows]


# ------------------------------------------------------------------ what a user gets
@dataclass(frozen=True)
class TokenLogprobs:
    """log p of the chosen token and of the likeliest ones, before temperature and truncation."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "abort"; None while it runs
    stop_reason: str | int | None
    seed: int
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class Output:
    """The answer to one prompt; `n` completions, of which the first is at hand directly."""

    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def stats(self) -> Stats:
        return self.completions[0].stats


@dataclass
class Chunk:
    """A piece of a streamed answer: the new text, its tokens, and which of them were drafted."""

    text: str
    token_ids: list[int]
    from_draft: list[bool]
    index: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: Stats | None = None  # of the request so far
    completion: Completion | None = None  # whole, on the last piece
    logprobs: list[TokenLogprobs] | None = None  # of these tokens, where they were asked for
    draft: Tree | None = None  # that was verified in this step, where somebody wants to see it,
    accepted: list[int] = field(default_factory=list)  # and which of its nodes were
