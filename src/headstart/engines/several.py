"""Several engines in one run, in turns: what they are compared with is plain decoding of the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from headstart.bench.methods import Method
from headstart.bench.records import Result
from headstart.bench.run import Engine, Plan, Session
from headstart.bench.workloads import Prompt
from headstart.engines.launched import LaunchedEngine


class SeveralEngines:
    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.engines, self.name = dict(engines), ",".join(engines)

    @contextmanager
    def open(self, methods: Sequence[Method], plan: Plan) -> Iterator[dict[str, Session]]:
        """Each has its own methods; the first has those that name no engine."""
        first = next(iter(self.engines))
        sessions: dict[str, Session] = {}
        with ExitStack() as stack:
            for name, engine in self.engines.items():
                own = [method for method in methods if (method.engine or first) == name]
                if isinstance(engine, LaunchedEngine):
                    engine.beside = len(methods) - len(own)
                sessions |= stack.enter_context(engine.open(own, plan))
            yield {method.name: sessions[method.name] for method in methods}

    def margin(self, prompt: Prompt, before: Sequence[int], a: int, b: int) -> tuple[float, bool] | None:
        return next(iter(self.engines.values())).margin(prompt, before, a, b)

    def roofline(self, result: Result) -> dict[str, Any] | None:
        found = (engine.roofline(result) for engine in self.engines.values())
        return next((roof for roof in found if roof is not None), None)
