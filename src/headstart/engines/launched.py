"""Engines that we start ourselves, under test: a server for each method, all of them up, so that laps can take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headstart.bench import meters
from headstart.bench.methods import Method
from headstart.bench.run import Plan
from headstart.bench.workloads import Prompt
from headstart.engines import llamacpp, tabbyapi, vllm
from headstart.engines.endpoint import Elsewhere, EndpointSession
from headstart.engines.launching import Child, Launch, Order, free_port, started
from headstart.errors import HeadstartError, RequestFailed

Launcher = Callable[[Order, str], Launch]
LAUNCHERS: Mapping[str, Launcher] = {"vllm": vllm.launch, "llamacpp": llamacpp.launch, "tabbyapi": tabbyapi.launch}
SPARE = 256  # tokens beside prompt and answer: a chat template's


class LaunchedEngine(Elsewhere):
    def __init__(self, name: str, where: str, order: Order, logs: Path) -> None:
        """`order` is for all methods; `where` is what the user said of where the engine is."""
        self.name, self.where, self.order, self.logs = name, where, order, logs
        self.beside = 0  # methods of other engines, which have their memory too

    @contextmanager
    def open(self, methods: Sequence[Method], plan: Plan) -> Iterator[dict[str, EndpointSession]]:
        launches = {method.name: self._launch(method, methods, plan) for method in methods}
        with started(launches, self.logs) as children:
            sessions = {name: self._session(child) for name, child in children.items()}
            for session in sessions.values():
                session.greet()
            try:
                yield sessions
            except RequestFailed as error:
                for child in children.values():
                    if child.has_ended():
                        raise HeadstartError(f"{child.launch.engine} ended: {child.why()}") from error
                raise

    def _launch(self, method: Method, methods: Sequence[Method], plan: Plan) -> Launch:
        order = replace(
            self.order,
            method=method,
            port=free_port(),
            max_len=self.order.max_len or longest(plan),
            at_once=self.order.at_once or plan.most_at_once,
            share=1 / (len(methods) + self.beside),
        )
        return LAUNCHERS[self.name](order, self.where)

    def _session(self, child: Child) -> EndpointSession:
        launch = child.launch
        about: dict[str, Any] = {"command": list(launch.command)}
        if gpus := meters.visible_gpus()[: self.order.tensor_parallel]:
            about["gpus"] = gpus  # on which it computes
        elif (held := child.resident) is not None:
            about["memory"] = held
        return EndpointSession(launch.url, {}, None, launch.asks, about=about, forgets=launch.forgets)


def longest(plan: Plan) -> int:
    """Tokens that a text may have here: two characters are at least one."""
    sizes = [_size(prompt) for prompt in plan.workload.prompts]
    return max(sizes) + plan.max_tokens + SPARE


def _size(prompt: Prompt) -> int:
    content = prompt.content
    texts = [content] if isinstance(content, str) else [m["content"] for m in content if not isinstance(m, int)]
    return sum(len(text.encode()) // 2 for text in texts) or len(content)
