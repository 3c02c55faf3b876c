"""A race: the same prompt decoded plainly, then with speculation, on one loaded model. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headstart.bench.own import margin_between, near_tie
from headstart.bench.summary import first_difference
from headstart.cli.paint import Painter, Piece
from headstart.core import Chunk, SamplingParams, Stats
from headstart.errors import RequestFailed

if TYPE_CHECKING:
    from headstart.llm import LLM

PLAIN = {"enabled": False}


@dataclass
class Lane:
    """One way through a prompt, while it runs and after."""

    name: str
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    stats: Stats | None = None  # when it is over

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0

    @property
    def block_efficiency(self) -> float:
        return len(self.token_ids) / self.steps if self.steps else 0.0

    def add(self, chunk: Chunk, pieces: list[Piece], seconds: float) -> None:
        self.pieces += pieces
        self.token_ids += chunk.token_ids
        self.steps += 1
        self.seconds = seconds
        if chunk.completion is not None:
            self.stats = chunk.completion.stats
            self.seconds = self.stats.time_total

    def result(self) -> dict[str, Any]:
        return {
            "tokens": len(self.token_ids),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "text": self.text,
            "token_ids": self.token_ids,
            "stats": self.stats,
        }


@dataclass
class Race:
    title: str
    prompt: str
    prompt_ids: list[int]
    plain: Lane
    speculative: Lane
    margin: float | None = None  # log p between the two tokens where the texts part
    near_tie: bool = False  # rounding alone explains the difference

    @property
    def ratio(self) -> float:
        slow = self.plain.tokens_per_second
        return self.speculative.tokens_per_second / slow if slow else 0.0

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None when both are identical."""
        return first_difference(self.plain.token_ids, self.speculative.token_ids)

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    def result(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "prompt": self.prompt,
            "prompt_tokens": len(self.prompt_ids),
            "plain": self.plain.result(),
            "speculative": self.speculative.result(),
            "ratio": self.ratio,
            "identical": self.identical,
            "first_difference": self.first_difference,
            "margin": self.margin,
            "near_tie": self.near_tie,
        }


def warm_up(llm: LLM, races: list[Race]) -> None:
    """What happens once happens now, for both lanes: allocations, and each prompt's KV."""
    short = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for speculative in (PLAIN, None):
        llm.generate("one two three one two three one two", short, speculative=speculative)
        for race in races:
            llm.generate(race.prompt_ids, SamplingParams(max_tokens=1, temperature=0), speculative=speculative)


def run(llm: LLM, race: Race, params: SamplingParams, changed: Callable[[], None]) -> None:
    """Plain first, then with speculation, never both at once: they would compete for the cores."""
    for lane, speculative in ((race.plain, PLAIN), (race.speculative, None)):
        _run_lane(llm, race.prompt_ids, params, lane, speculative, changed)
    if not race.identical and params.greedy:
        race.margin = _margin(llm, race)
        race.near_tie = race.margin is not None and race.margin < near_tie(llm.model.model)


def _run_lane(
    llm: LLM, ids: list[int], params: SamplingParams, lane: Lane, speculative: Any, changed: Callable[[], None]
) -> None:
    painter = Painter(lambda tokens: llm.tokenizer.decode(tokens, params.skip_special_tokens))
    began = time.perf_counter()
    for chunk in llm.stream(ids, params, speculative=speculative):
        lane.add(chunk, painter.pieces(chunk), time.perf_counter() - began)
        changed()
    if lane.stats is None:
        raise RequestFailed("The answer ended without its statistics.")


def _margin(llm: LLM, race: Race) -> float | None:
    """How far apart the target itself sees the two tokens at which the texts part."""
    at = race.first_difference
    ids = [lane.token_ids[at] for lane in (race.plain, race.speculative) if at is not None and at < len(lane.token_ids)]
    if len(ids) < 2:
        return None
    return margin_between(llm, race.prompt_ids + race.plain.token_ids[:at], *ids)
