"""Run the engine on a tiny model, step by step, with its integrity checked after every step."""

from __future__ import annotations

from typing import Any

import torch

from headstart.config import EngineConfig, parse_request_speculation, parse_speculative
from headstart.core import Request, SamplingParams
from headstart.drafters import Surroundings
from headstart.engine import Engine
from headstart.models.load import Loaded
from headstart.models.runner import TorchRunner
from headstart.models.runners import make_runner


def engine(
    model: Any,
    speculative: Any = None,
    draft: Any = None,
    pages: int = 400,
    max_len: int = 500,
    head: Any = None,
    **config: Any,
) -> Engine:
    """An engine without tokenizer around a model in memory."""
    spec, _ = parse_speculative(speculative)
    how = {name: config.pop(name) for name in ("fuse", "deterministic") if name in config}
    runner = model if isinstance(model, TorchRunner) else make_runner(model, **how)
    extras: dict[str, Any] = {"head": head} if head is not None else {}
    if draft is not None:
        extras["draft_model"] = Loaded("draft", draft, None, frozenset(), 512, 211)
    around = Surroundings(
        runner.vocab_size, device=str(runner.device), max_num_seqs=8, max_model_len=max_len, page_size=4, extras=extras,
        takes_mail=runner.chooses, hidden_states=runner.hidden_states, target=runner,
    )  # fmt: skip
    options = {"max_num_seqs": 8, "max_batch_tokens": 64, "page_size": 4} | config
    return Engine(runner, EngineConfig(**options), max_len, pages, spec, around)


def request(prompt: list[int], speculative: Any = None, seed: int = 1, eos: int | None = 0, **params: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": 24} | params
    own = parse_request_speculation(speculative)
    stop = frozenset() if eos is None else frozenset([eos])
    return Request(list(prompt), SamplingParams(**options), seed, eos_ids=stop, speculation=own)


def run(engine: Engine, requests: list[Request], arrivals: int = 0) -> list[list[int]]:
    """All requests to their end; `arrivals` > 0 lets one join every so many steps."""
    waiting = list(requests)
    steps = 0
    while waiting or not engine.idle:
        if waiting and (not arrivals or steps % arrivals == 0):
            for r in waiting if not arrivals else waiting[:1]:
                engine.add(r)
            waiting = waiting[1:] if arrivals else []
        engine.step()
        engine.check_integrity()
        steps += 1
        assert steps < 5000, "the engine does not finish"
    assert engine.pool.num_used == 0, "KV is left behind"
    return [r.output for r in requests]


class Drafts:
    """What was drafted behind which text, told when it is verified; and how many forwards stood where only the device knew."""

    def __init__(self, e: Engine) -> None:
        self.engine, self.ahead = e, 0
        self.found: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        drafter = next(iter(e.drafting.drafters.values()))
        self.observe, self.forward, self.again = drafter.observe, e.runner.forward, e.runner.again
        drafter.observe, e.runner.forward = self._observe, self._forward  # type: ignore[method-assign]
        e.runner.again = self._again  # type: ignore[method-assign]

    def _observe(self, view: Any, trees: Any, verdicts: Any) -> None:
        for r, tree, verdict in zip(view.requests, trees, verdicts, strict=True):
            if r.request.finish_reason is None:
                before = tuple(r.tokens[: len(r.tokens) - len(verdict.accepted) - 1])
                self.found[before] = (list(tree.tokens), list(tree.parents))
        self.observe(view, trees, verdicts)

    def _forward(self, batch: Any) -> Any:
        self.ahead += any(s.moves for s in batch.segments)
        return self.forward(batch)

    def _again(self, batch: Any) -> Any:
        self.ahead += batch.mail is not None
        return self.again(batch)


@torch.inference_mode()
def generate(model: Any, prompt: list[int], max_tokens: int, eos: int | None = 0) -> list[int]:
    """transformers' own greedy continuation."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
        eos_token_id=eos if eos is not None else -1, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def assert_same(model: Any, prompt: list[int], ours: list[int], theirs: list[int], tolerance: float = 1e-3) -> None:
    """Equal token by token; where they part, the two tokens must be a near-tie of the stock model, and that is said."""
    if ours == theirs:
        return
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    assert at < min(len(ours), len(theirs)), f"one text ends early, at token {at}"
    logits = model(torch.tensor([prompt + theirs[:at]], device=model.device), use_cache=False).logits[0, -1]
    margin = float((logits[theirs[at]] - logits[ours[at]]).abs())
    assert margin < tolerance, f"token {at}: {ours[at]} instead of {theirs[at]}, margin {margin:.2g}: no near-tie"
    print(f"near-tie at token {at}: margin {margin:.2g}")
