"""Hugging Face's own `generate` under test: plain, with prompt lookup, or with an assistant model. One request at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headstart.bench import meters, roofline
from headstart.bench.methods import Method
from headstart.bench.own import encode, near_tie
from headstart.bench.records import Counts, Result
from headstart.bench.run import Answer, Ask, Plan
from headstart.bench.workloads import Prompt
from headstart.errors import BadInput

if TYPE_CHECKING:
    from headstart.models.load import Loaded

DRAFT_TOKENS = 5  # as elsewhere; generate's own number is 20 for an assistant


class TransformersEngine:
    name = "transformers"

    def __init__(self, loaded: Loaded, device: str = "auto") -> None:
        self.loaded, self.device = loaded, device

    @contextmanager
    def open(self, methods: Sequence[Method], plan: Plan) -> Iterator[dict[str, TransformersSession]]:
        if plan.most_at_once > 1:
            raise BadInput("transformers speculates for one request at a time: --concurrency has to be 1.")
        ids = {prompt.id: encode(self.loaded.tokenizer, prompt) for prompt in plan.workload.prompts}
        yield {method.name: self._session(method, ids) for method in methods}

    def _session(self, method: Method, ids: Mapping[str, list[int]]) -> TransformersSession:
        before = meters.held_bytes()
        how = self._how(method)
        held = roofline.weight_bytes(self.loaded.model) + max(0, meters.held_bytes() - before)
        return TransformersSession(self.loaded, ids, how, {"memory": held})

    def _how(self, method: Method) -> dict[str, Any]:
        """As keyword arguments of `generate`."""
        kind, tokens = method.config.get("method"), method.tokens or DRAFT_TOKENS
        if kind is None:
            return {}
        if kind == "ngram":
            return {"prompt_lookup_num_tokens": tokens}
        if kind == "draft_model":
            from headstart.models.load import load

            model = load(method.config["model"], self.device, runner="torch").model
            model.generation_config.num_assistant_tokens = tokens
            model.generation_config.num_assistant_tokens_schedule = "constant"
            model.generation_config.assistant_confidence_threshold = 0.0
            return {"assistant_model": model}
        raise BadInput(f"transformers has no {kind!r} here: choose from none, ngram and draft_model.")

    def margin(self, prompt: Prompt, before: Sequence[int], a: int, b: int) -> tuple[float, bool]:
        import torch

        model = self.loaded.model
        ids = torch.tensor([[*encode(self.loaded.tokenizer, prompt), *before]], device=model.device)
        with torch.inference_mode():
            logp = model(ids).logits[0, -1].float().log_softmax(-1)
        apart = abs(float(logp[a] - logp[b]))
        return apart, apart < near_tie(model)

    def roofline(self, result: Result) -> dict[str, Any] | None:
        return roofline.measure(result, self.loaded.model)


@dataclass
class TransformersSession:
    loaded: Loaded
    ids: Mapping[str, list[int]]
    how: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    def forget(self) -> None:
        """Each call begins anew."""

    def counts(self) -> Counts | None:
        return None

    async def answer(self, prompt: Prompt, ask: Ask) -> Answer:
        return await asyncio.to_thread(self._answer, self.ids[prompt.id], ask)

    def _answer(self, ids: list[int], ask: Ask) -> Answer:
        import torch

        model = self.loaded.model
        given, clock = torch.tensor([ids], device=model.device), Clock()
        calls = Calls(model)
        torch.manual_seed(ask.seed)
        sampled = {"do_sample": True, "temperature": ask.temperature} if ask.temperature > 0 else {"do_sample": False}
        ends = {} if not ask.ignore_eos else {"min_new_tokens": ask.max_tokens}
        with torch.inference_mode(), calls:
            began = time.perf_counter()
            out = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=ask.max_tokens, streamer=clock,
                top_k=0, top_p=1.0, eos_token_id=sorted(self.loaded.eos_ids) or None,
                pad_token_id=min(self.loaded.eos_ids, default=0), **sampled, **ends, **self.how,
            )  # fmt: skip
            seconds = time.perf_counter() - began
        made = out[0, len(ids) :].tolist()
        first = (clock.first or began + seconds) - began
        text = self.loaded.tokenizer.decode(made)
        return Answer(text, len(ids), len(made), seconds, first, clock.with_first, made, Counts(steps=calls.count))


class Clock:
    """A streamer that writes down when the first tokens came."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.with_first, self._prompt = 1, True

    def put(self, value: Any) -> None:
        if self._prompt:  # comes first, and at once
            self._prompt = False
        elif self.first is None:
            self.first, self.with_first = time.perf_counter(), int(value.numel())

    def end(self) -> None:
        """Nothing is held back."""


class Calls:
    """How often the target is run."""

    def __init__(self, model: Any) -> None:
        self.model, self.count = model, 0

    def __enter__(self) -> Calls:
        self._hook = self.model.register_forward_hook(self._add)
        return self

    def _add(self, *_: Any) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
