"""Headstart's own engine under test: one LLM for each method, around the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headstart.bench import meters, roofline
from headstart.bench.methods import Method
from headstart.bench.records import Counts, Result
from headstart.bench.run import Answer, Ask, Plan
from headstart.bench.workloads import Prompt
from headstart.core import SamplingParams, Stats
from headstart.errors import BadInput

if TYPE_CHECKING:
    from headstart.llm import LLM
    from headstart.models.load import Loaded

NEAR_TIE = {
    "float32": 1e-2,
    "float16": 5e-2,
    "bfloat16": 0.25,
}  # in log p: rounding alone can swap tokens that are closer
SPARE = 64  # tokens beside the longest prompt and its answer


class OwnEngine:
    name = "headstart"

    def __init__(self, loaded: Loaded, options: Mapping[str, Any] | None = None) -> None:
        """`options` are for each LLM."""
        self.loaded, self.options = loaded, dict(options or {})
        self._ids: dict[str, list[int]] = {}  # by prompt
        self._plain: LLM | None = None

    @contextmanager
    def open(self, methods: Sequence[Method], plan: Plan) -> Iterator[dict[str, OwnSession]]:
        from headstart.llm import LLM
        from headstart.rehearse import prepare

        self._ids = {prompt.id: encode(self.loaded.tokenizer, prompt) for prompt in plan.workload.prompts}
        target = replace(self.loaded, max_len=self._room(plan))
        weights = roofline.weight_bytes(self.loaded.model)
        options = {"max_num_seqs": plan.most_at_once, "wide_weights": _wide(self.loaded.model)} | self.options
        with ExitStack() as stack:
            sessions = {}
            for method in methods:
                before = meters.held_bytes()
                llm = stack.enter_context(LLM(target, speculative=dict(method.config) or None, **options))
                held = weights + max(0, meters.held_bytes() - before)
                prepare(llm.engine)
                sessions[method.name] = OwnSession(llm, self._ids, {"memory": held, "weights": weights})
            self._plain = next(sessions[method.name].llm for method in methods if not method.config)
            yield sessions

    def margin(self, prompt: Prompt, before: Sequence[int], a: int, b: int) -> tuple[float, bool] | None:
        if self._plain is None:
            return None
        apart = margin_between(self._plain, [*self._ids[prompt.id], *before], a, b)
        return None if apart is None else (apart, apart < near_tie(self.loaded.model))

    def _room(self, plan: Plan) -> int:
        """Tokens of the longest text that there will be: several engines share the memory."""
        longest = max(map(len, self._ids.values()))
        if longest + plan.max_tokens > self.loaded.max_len:
            raise BadInput(
                f"The longest prompt has {longest} tokens; with answers of {plan.max_tokens} that is more than the "
                f"{self.loaded.max_len} of this model: choose other prompts or a smaller --max-tokens."
            )
        return min(self.loaded.max_len, longest + plan.max_tokens + SPARE)

    def roofline(self, result: Result) -> dict[str, Any] | None:
        return roofline.measure(result, self.loaded.model)


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """A conversation goes through the chat template; a model without one writes on from the last message."""
    content = prompt.content
    if isinstance(content, str):
        return list(tokenizer.encode(content))
    if content and isinstance(content[0], int):
        return [int(token) for token in content]
    messages = [dict(message) for message in content]  # type: ignore[arg-type]
    if tokenizer.has_chat_template():
        return list(tokenizer.chat(messages))
    return list(tokenizer.encode(str(messages[-1]["content"])))


class OwnSession:
    def __init__(self, llm: LLM, ids: Mapping[str, list[int]], about: Mapping[str, Any]) -> None:
        self.llm, self._ids, self.about = llm, ids, about

    async def answer(self, prompt: Prompt, ask: Ask) -> Answer:
        params = SamplingParams(
            max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed, ignore_eos=ask.ignore_eos
        )
        output = await self.llm.agenerate(self._ids[prompt.id], params)
        stats = output.stats
        return Answer(
            output.text, stats.prompt_tokens, stats.tokens, stats.time_total, stats.time_to_first_token,
            max(1, stats.first_tokens), list(output.token_ids), _counts(stats),
        )  # fmt: skip

    def forget(self) -> None:
        self.llm.forget()

    def counts(self) -> None:
        """Each request tells its own."""
        return None


def _counts(stats: Stats) -> Counts:
    return Counts(
        stats.steps, stats.drafts, stats.drafted, stats.accepted, list(stats.accepted_by_position), stats.time_draft,
        stats.time_target,
    )  # fmt: skip


def _wide(model: Any) -> bool | None:
    """What helps plain decoding of many requests as well is not speculation's gain: all get it, or none."""
    return True if hasattr(model, "parameters") else None


# ------------------------------------------------------------------ near-ties
def near_tie(model: Any) -> float:
    return NEAR_TIE.get(str(getattr(model, "dtype", "")).removeprefix("torch."), NEAR_TIE["bfloat16"])


def margin_between(llm: LLM, ids: Sequence[int], a: int, b: int) -> float | None:
    """How far apart the target itself sees two tokens behind these; None where one is not among its twenty best."""
    asked = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    output = llm.generate(list(ids), asked, speculative={"enabled": False})[0]
    top = output.logprobs[0].top if output.logprobs else {}
    return abs(top[a] - top[b]) if a in top and b in top else None
