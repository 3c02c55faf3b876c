"""The offline API: `LLM(model).generate(prompts)`, `.chat`, `.stream`, and the same with `a` in front for asyncio."""

from __future__ import annotations

import asyncio
import functools
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.config import (
    AUTO,
    HEADS,
    OF_TORCH,
    EngineConfig,
    SpeculativeConfig,
    parse_request_speculation,
    parse_speculative,
)
from headstart.core import Chunk, Completion, Form, Output, Request, SamplingParams, StructuredOutputs
from headstart.errors import BadInput, ConfigError, HeadstartError, RequestFailed
from headstart.progress import note, status
from headstart.threads import apart

if TYPE_CHECKING:
    from headstart.grammar import Grammars
    from headstart.loop import Health
    from headstart.models.heads import Head
    from headstart.models.load import Loaded
    from headstart.policy.adaptive import AdaptivePolicy
    from headstart.policy.ahead import AheadPolicy
    from headstart.policy.explain import Explanation
    from headstart.policy.store import Store

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages
_Event = tuple[Request, Chunk | BaseException]
CPU_SHARE, CUDA_SHARE = 0.25, 0.8  # of the free memory, for KV
MOST_WAIT = 0.02  # seconds that the engine gives event loops to send what a step brought


class LLM:
    """A target model with its drafter, ready to generate. Use it as a context manager, or `close()` it, to free everything.

    model        built-in name, folder, GGUF file, ollama:NAME or hub id
    runner       auto, torch or llamacpp: who computes a GGUF file; gpu_layers, flash_attention and kv_type are llama.cpp's
    speculative  "auto": whatever pays. Or None, a method's name, or a dict in Headstart's, vLLM's or llama.cpp's words
    kv_memory    bytes for the KV pool; by default a share of the free memory
    """

    def __init__(
        self,
        model: str | Path | Loaded = "smollm2",
        *,
        speculative: Any = AUTO,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_batch_tokens: int = 512,
        kv_memory: int | None = None,
        page_size: int = 16,
        share_prefixes: bool = True,
        fuse: bool = True,
        kernels: bool = True,
        deterministic: bool = False,
        wide_weights: bool | None = None,
        quantize: str | None = None,
        runner: str = "auto",
        gpu_layers: int = -1,
        flash_attention: bool | None = None,
        kv_type: str = "f16",
        threads: int | None = None,
        profile: bool = False,
        record: str | None = None,
        trust_remote_code: bool = False,
        draft: Loaded | None = None,
    ) -> None:
        config, notes = parse_speculative(speculative)
        for text in notes:
            note(text)
        engine_config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            kv_memory=kv_memory,
            page_size=page_size,
            share_prefixes=share_prefixes,
            fuse=fuse,
            kernels=kernels,
            deterministic=deterministic,
            wide_weights=wide_weights,
            quantize=quantize,
            profile=profile,
            record=record,
        )
        from headstart.drafters import find
        from headstart.models import quantized
        from headstart.models.heads.at_hand import is_head
        from headstart.models.llamacpp.native import LlamaOptions
        from headstart.models.load import load, pick_device, pick_dtype
        from headstart.models.runners import require_kernels
        from headstart.policy.recording import check_writable

        if record is not None:
            check_writable(record)  # said before a model is loaded
        llama = LlamaOptions(gpu_layers, threads, flash_attention, kv_type)
        plain = (
            fuse and kernels and not (deterministic or wide_weights or quantize)
        )  # what is asked of torch, torch gets
        who = "torch" if runner == "auto" and not plain else runner

        if config.method not in ("none", AUTO):
            find(config)  # an unknown method is said before a model is loaded
        if config.method in HEADS:
            _head_path(config, str(model) if isinstance(model, (str, Path)) else model.name)
        if deterministic and isinstance(model, (str, Path)):
            require_kernels(pick_device(device), kernels)
        if quantize and isinstance(model, (str, Path)):
            where = pick_device(device)
            quantized.refuse(quantize, where, pick_dtype(dtype, where))
        if draft is not None and config.method not in ("draft_model", AUTO):
            raise ConfigError("draft= was given, but the method is not draft_model.")
        asked = (device, dtype, max_model_len, trust_remote_code, runner, gpu_layers, flash_attention, kv_type)
        if not isinstance(model, (str, Path)) and asked != ("auto", "auto", None, False, "auto", -1, None, "f16"):
            raise ConfigError(
                "device, dtype, max_model_len, trust_remote_code, runner, gpu_layers, flash_attention and kv_type are for "
                "loading; this model is loaded."
            )

        def build() -> tuple[Loaded, Any]:
            target, helper = model, draft
            if isinstance(target, (str, Path)):
                named = config.method in OF_TORCH or (config.method == AUTO and is_head(config.model))
                way = "torch" if named and who == "auto" else who
                target = load(target, device, dtype, max_model_len, trust_remote_code, way, llama)
            head = _load_head(config, target) if config.method in HEADS else None
            if config.method == AUTO:
                head = _head_at_hand(config, target)
            drafts = config.method == "draft_model" or (config.method == AUTO and config.model and head is None)
            if drafts and helper is None:  # before the KV pools take what memory is free
                helper = _load_draft(config, device, trust_remote_code, "torch" if who == "torch" else "auto", threads)
            return target, start_engine(target, config, engine_config, device, helper, head)

        self.model, self._loop = apart(build)
        self.tokenizer = self.model.tokenizer
        self._mailboxes: weakref.WeakKeyDictionary[Any, _Mailbox] = weakref.WeakKeyDictionary()  # by event loop
        self._told: list[_Mailbox] = []  # in this step; the engine's thread alone looks at it
        self._loop.between = self._let_them_send
        self._close = weakref.finalize(self, self._loop.close)  # also when the interpreter ends

    @property
    def engine(self) -> Any:
        return self._loop.engine

    def explain(self) -> Explanation:
        """Why so much is drafted, and by whom: what the policy has measured and believes."""
        return self._loop.engine.policy.explain()

    @property
    def health(self) -> Health:
        """Whether the engine runs, and how often it had to be started again."""
        return self._loop.health

    def end_all(self, error: HeadstartError) -> None:
        """Everything that runs or waits ends with this error."""
        self._loop.end_all(error)

    def forget(self) -> None:
        """What earlier requests have left to later ones: prefixes in KV, and texts that drafters remember. So a prompt that is
        asked again is asked as if for the first time. What was measured of the machine stays."""
        self._loop.do(self.engine.forget)

    def close(self) -> None:
        """Stop the engine and free what it holds."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ whole answers
    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: Any = None,
        progress: bool = False,
    ) -> list[Output]:
        """Answers to one prompt or many, texts or token ids, in order. `speculative` is for this call only."""
        jobs = self._jobs(_as_list(prompts), params, speculative)
        return self._finish(jobs, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: Any = None,
        progress: bool = False,
    ) -> list[Output]:
        """Answers to one conversation or many, through the model's chat template."""
        many = _conversations(messages)
        return self._finish(self._jobs(many, params, speculative), progress)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculative: Any = None
    ) -> Output:
        """One answer, without blocking the event loop. Cancelling the task cancels the request."""
        job = self._job(prompt, params, speculative, streams=False)
        async with aclosing(self._listen([job])) as chunks:
            async for _ in chunks:
                pass
        return job.output()

    async def achat(
        self, messages: Messages, params: SamplingParams | None = None, *, speculative: Any = None
    ) -> Output:
        return await self.agenerate(messages, params, speculative=speculative)

    # ------------------------------------------------------------------ streams
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculative: Any = None,
        show_drafts: bool = False,
    ) -> Iterator[Chunk]:
        """Pieces of the answer as they are committed. Leaving the loop early cancels the request. With `show_drafts`, each
        piece carries the draft that was verified for it, and which of its nodes were accepted."""
        job = self._job(prompt, params, speculative, show_drafts=show_drafts)
        inbox: queue.SimpleQueue[tuple[Request, Chunk | BaseException]] = queue.SimpleQueue()
        self._loop.submit(job.requests, lambda r, c: inbox.put((r, c)))
        try:
            while not job.done:
                yield job.receive(*inbox.get())
        finally:
            self._cancel(job)

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculative: Any = None,
        show_drafts: bool = False,
    ) -> AsyncIterator[Chunk]:
        every = self.astream_all([prompt], params, speculative=speculative, show_drafts=show_drafts)
        async with aclosing(every) as chunks:
            async for _, chunk in chunks:
                yield chunk

    def astream_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        speculative: Any = None,
        show_drafts: bool = False,
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Pieces of the answers to many prompts, each with the number of its prompt, as they are committed."""
        return self._listen([self._job(p, params, speculative, show_drafts=show_drafts) for p in prompts])

    async def _listen(self, jobs: Sequence[_Job]) -> AsyncGenerator[tuple[int, Chunk], None]:
        mailbox = self._mailboxes.setdefault(asyncio.get_running_loop(), _Mailbox(self._told))
        inbox, owner = _Inbox(), {r.id: (i, job) for i, job in enumerate(jobs) for r in job.requests}
        self._loop.submit([r for job in jobs for r in job.requests], lambda r, c: mailbox.put(inbox, (r, c)))
        try:
            left = len(owner)
            while left:
                if not inbox.events:
                    await inbox.arrival()
                request, event = inbox.events.popleft()
                i, job = owner[request.id]
                chunk = job.receive(request, event)
                left -= chunk.finish_reason is not None
                yield i, chunk
        finally:
            for job in jobs:
                self._cancel(job)

    def _let_them_send(self) -> None:
        """Event loops that were told something send it before the engine goes on, which takes all cores and much of the
        interpreter: beside it they take several times as long, and it does not get further meanwhile."""
        told, self._told[:] = list(self._told), []
        for mailbox in told:
            mailbox.wait()

    # ------------------------------------------------------------------ inside
    def _finish(self, jobs: list[_Job], progress: bool) -> list[Output]:
        heard: deque[tuple[Request, Chunk | BaseException]] = deque()
        ends: queue.SimpleQueue[None] = queue.SimpleQueue()

        def listen(request: Request, event: Chunk | BaseException) -> None:
            """Wake the caller for ends only: a thread that wakes up for each token disturbs the ones that compute."""
            heard.append((request, event))
            if not isinstance(event, Chunk) or event.finish_reason is not None:
                ends.put(None)

        owner = {r.id: job for job in jobs for r in job.requests}
        self._loop.submit([r for job in jobs for r in job.requests], listen)
        from headstart.progress import bar

        running = len(owner)
        try:
            with bar("Generating", running, "requests") if progress else _no_bar() as advance:
                while running:
                    ends.get()
                    while heard:
                        request, event = heard.popleft()
                        chunk = owner[request.id].receive(request, event)
                        if chunk.finish_reason is not None:
                            running -= 1
                            advance(1)
        finally:
            for job in jobs:
                self._cancel(job)
        return [job.output() for job in jobs]

    def _cancel(self, job: _Job) -> None:
        left = [r for r in job.requests if r.finish_reason is None]
        if left:
            self._loop.cancel(left)

    def _jobs(self, prompts: Sequence[Prompt], params: Any, speculative: Any) -> list[_Job]:
        if not prompts:
            raise BadInput("No prompt was given.")
        many = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(many) != len(prompts):
            raise BadInput(f"{len(prompts)} prompts but {len(many)} sampling parameters.")
        return [self._job(prompt, p, speculative, streams=False) for prompt, p in zip(prompts, many, strict=True)]

    def _job(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        speculative: Any,
        streams: bool = True,
        show_drafts: bool = False,
    ) -> _Job:
        """One prompt becomes n requests that differ in their seeds."""
        from headstart.noise import derive_seed

        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise BadInput(f"params should be SamplingParams(...), not {type(params).__name__}.")
        own = parse_request_speculation(speculative)
        text, ids = self._encode(prompt)
        seed = secrets.randbits(62) if params.seed is None else params.seed
        seeds = [seed, *(derive_seed(seed, i) for i in range(1, params.n))]
        bad = tuple(ids for word in params.bad_words for ids in self._spellings(word))
        forms = [self._form(params) for _ in range(params.n)]
        now = time.perf_counter()
        first = params if params.n == 1 else replace(params, n=1)
        others = replace(first, prompt_logprobs=None) if params.n > 1 else first  # the first tells the prompt's for all
        requests = [
            Request(
                ids,
                p,
                s,
                eos_ids=self.model.eos_ids,
                bad_word_ids=bad,
                form=form,
                speculation=own,
                arrived=now,
                streams=streams,
                shows_drafts=show_drafts,
            )
            for s, p, form in zip(seeds, [first] + [others] * (params.n - 1), forms, strict=True)
        ]
        return _Job(text, requests)

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer().encode(prompt)
        items = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if set(map(type, items)) == {int}:
            return None, items
        if items and isinstance(items[0], Mapping):
            return None, self._need_tokenizer().chat([dict(m) for m in items])
        if not all(isinstance(t, int) or hasattr(t, "__index__") for t in items):
            raise BadInput("A prompt should be a text, a list of token ids, or a list of messages.")
        return None, [int(t) for t in items]

    def check(
        self, prompts: Sequence[list[int]], params: SamplingParams | None = None, *, speculative: Any = None
    ) -> None:
        """Say what is wrong with a request, as far as the model matters, and have ready what takes long to make."""
        params = params or SamplingParams()
        own = parse_request_speculation(speculative)
        for ids in prompts:
            self.engine.check(Request(ids, params, 0, speculation=own))
        self._form(params)

    def _form(self, params: SamplingParams) -> Form | None:
        wanted = params.structured_outputs
        return self._grammars.form(wanted) if isinstance(wanted, StructuredOutputs) else None

    @functools.cached_property
    def _grammars(self) -> Grammars:
        from headstart.grammar import Grammars

        return Grammars(self._need_tokenizer(), self.engine.runner.vocab_size, sorted(self.model.eos_ids))

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise BadInput("This model was given without a tokenizer: pass token ids.")
        return self.tokenizer

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A bad word's tokens, at the start of a word and inside one."""
        tokenizer = self._need_tokenizer()
        found = {tuple(tokenizer.encode(w, special=False)) for w in (word, " " + word.lstrip())}
        return sorted(ids for ids in found if ids)


class _Mailbox:
    """What a step brought to the listeners of one event loop, which is woken once for all of them."""

    def __init__(self, told: list[_Mailbox]) -> None:
        self._loop, self._told = asyncio.get_running_loop(), told
        self._held: deque[tuple[_Inbox, _Event]] = deque()
        self._sent, self._late = threading.Event(), False

    # ------------------------------------------------------------------ on the engine's thread
    def put(self, inbox: _Inbox, event: _Event) -> None:
        self._held.append((inbox, event))
        if len(self._held) > 1:  # it was told, and has not looked yet
            return
        self._sent.clear()
        try:
            self._loop.call_soon_threadsafe(self._hand_out)
            self._told.append(self)
        except RuntimeError:  # that loop is closed: each who writes there is to notice
            self._held.clear()
            raise

    def wait(self) -> None:
        """Until listeners have seen what is here. A loop that is busy with other things is not waited for again before it
        comes back."""
        if not self._late:
            self._late = not self._sent.wait(MOST_WAIT)

    # ------------------------------------------------------------------ on the event loop's
    def _hand_out(self) -> None:
        while self._held:
            inbox, event = self._held.popleft()
            inbox.put(event)
        self._loop.call_soon(self._seen)  # behind the listeners, who were woken just now

    def _seen(self) -> None:
        self._late = False
        self._sent.set()


class _Inbox:
    """Events of one listener. An `asyncio.Queue` does the same for many, and takes its time."""

    def __init__(self) -> None:
        self.events: deque[_Event] = deque()
        self._waits: asyncio.Future[None] | None = None

    def put(self, event: _Event) -> None:
        self.events.append(event)
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Of the next event."""
        self._waits = asyncio.get_running_loop().create_future()
        return self._waits


class _Job:
    """The requests of one prompt, while their chunks come in."""

    def __init__(self, prompt: str | None, requests: list[Request]) -> None:
        self.prompt, self.requests = prompt, requests
        self._index = {r.id: i for i, r in enumerate(requests)}
        self._texts = [""] * len(requests)
        self._left = len(requests)

    @property
    def done(self) -> bool:
        return self._left == 0

    def receive(self, request: Request, event: Chunk | BaseException) -> Chunk:
        if isinstance(event, HeadstartError):
            raise event
        if isinstance(event, BaseException):
            raise RequestFailed(f"The engine could not finish the request: {event}") from event
        event.index = self._index[request.id]
        self._texts[event.index] += event.text
        if event.finish_reason is not None:
            self._left -= 1
            event.completion = self._completion(event.index)
        return event

    def _completion(self, i: int) -> Completion:
        r = self.requests[i]
        asked = r.params.logprobs is not None
        return Completion(
            self._texts[i], r.output, r.finish_reason, r.stop_reason, r.seed, r.stats, r.logprobs if asked else None
        )

    def output(self) -> Output:
        first = self.requests[0]
        asked = first.params.prompt_logprobs is not None
        completions = [self._completion(i) for i in range(len(self.requests))]
        return Output(self.prompt, first.prompt, completions, first.prompt_logprobs if asked else None)


class _no_bar:
    def __enter__(self) -> Any:
        return lambda done: None

    def __exit__(self, *_: object) -> None: ...


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> many."""
    if isinstance(prompts, str):
        return [prompts]
    items = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if items and isinstance(items[0], (int, Mapping)):
        return [items]
    return items


def _conversations(messages: Any) -> list[Any]:
    items = [] if isinstance(messages, str) else list(messages)
    if not items:
        raise BadInput("chat() takes a list of messages, such as [{'role': 'user', 'content': 'Hello'}].")
    return [items] if isinstance(items[0], Mapping) else items


def _load_draft(
    config: SpeculativeConfig, device: str, trust_remote_code: bool, runner: str, threads: int | None
) -> Loaded:
    from headstart.models.llamacpp.native import LlamaOptions
    from headstart.models.load import load

    if not config.model:
        raise ConfigError("method 'draft_model' needs a model: {'method': 'draft_model', 'model': 'path or name'}.")
    where = device if config.draft_device == "auto" else config.draft_device
    llama = LlamaOptions(threads=threads)
    return load(config.model, where, config.draft_dtype, config.draft_max_model_len, trust_remote_code, runner, llama)


def _head_path(config: SpeculativeConfig, target: str) -> Path:
    """The folder that the config names, or that of the head which comes with a built-in target."""
    from headstart.models.builtin import head_of

    name, path = config.method, Path(config.model).expanduser() if config.model else head_of(target, config.method)
    if path is None:
        raise ConfigError(
            f"method {name!r} needs its checkpoint: {{'method': {name!r}, 'model': 'folder of the head'}}."
        )
    if not path.is_dir():
        raise ConfigError(f"There is no folder {path}: method {name!r} needs the folder of a head.")
    return path


def _head_at_hand(config: SpeculativeConfig, target: Loaded) -> Head | None:
    """The head that the config names, or that lies ready for this target; where the target tells its hidden states."""
    from headstart.models.heads.at_hand import find_head, is_head

    if config.model and not is_head(config.model):
        return None
    if not config.model and not hasattr(target.model, "config"):
        return None
    if config.model:
        return _load_head(config, target, Path(config.model).expanduser())
    path = find_head(target.name)
    try:
        return None if path is None else _load_head(config, target, path)
    except HeadstartError as error:  # nobody asked for this one
        note(f"A head lies ready for this target but cannot be used: {error}")
        return None


def _load_head(config: SpeculativeConfig, target: Loaded, path: Path | None = None) -> Head:
    """The checkpoint that the config names, checked against its target before a weight is read."""
    import torch

    from headstart.models.builtin import hub_id
    from headstart.models.heads.load import TargetFacts, load_head
    from headstart.models.heads.looped import shrink
    from headstart.models.load import pick_dtype

    if not hasattr(target.model, "config"):
        raise ConfigError(
            f"{config.method!r} needs hidden states of the target, which llama.cpp has not: use runner='torch'."
        )
    path = path or _head_path(config, target.name)
    model, facts = target.model, TargetFacts.of(hub_id(target.name), target.model)
    dtype = model.dtype if config.draft_dtype == "auto" else pick_dtype(config.draft_dtype, model.device)
    head = load_head(path, facts, model.device, dtype)
    if (method := head.spec.method) != config.method and config.method != AUTO:
        raise ConfigError(f"{path} holds a head of another kind: use method {method!r}.")
    if config.draft_dtype == "auto" and model.device.type == "cpu" and dtype == torch.float32:
        return shrink(head)
    return head


def start_engine(
    model: Loaded,
    config: SpeculativeConfig,
    engine_config: EngineConfig,
    device: str = "auto",
    draft: Loaded | None = None,
    head: Head | None = None,
) -> Any:
    """Runner, KV pool, drafter and engine around a loaded model."""
    from headstart.drafters import Surroundings
    from headstart.engine import Engine
    from headstart.loop import EngineLoop
    from headstart.models.runners import make_runner
    from headstart.policy.adaptive import AdaptivePolicy
    from headstart.policy.ahead import AheadPolicy

    wide = engine_config.wide_weights if engine_config.wide_weights is not None else config.method != "none"
    how = engine_config
    runner = make_runner(model.model, how.fuse, wide, how.kernels, how.deterministic, how.quantize)
    if config.method == AUTO and runner.chooses and head is None:
        note("auto drafts on GPUs where there is a head for the target; this one has none, so it is plain decoding.")
        config, draft = SpeculativeConfig(), None
    share = 0.2 if config.method == "draft_model" or draft is not None else 0.0  # of the KV memory, for the draft's own
    spare = runner.needs_bytes(engine_config.max_batch_tokens) * (2 if draft else 1)
    memory = engine_config.kv_memory or _kv_memory(runner.device, spare)
    slots = engine_config.max_num_seqs * (model.max_len + config.nodes)
    if engine_config.kv_memory is None and runner.usual_slots is not None:
        slots = min(slots, runner.usual_slots)
    own = sum(s.slot_bytes for s in head.shapes) if head else 0
    pages = int(min(memory * (1 - share) // (runner.slot_bytes + own), slots)) // engine_config.page_size
    if pages < 2:
        raise ConfigError(
            f"kv_memory of {memory} bytes holds {pages} pages; a page of {engine_config.page_size} tokens takes "
            f"{runner.slot_bytes * engine_config.page_size} bytes and two are the least."
        )
    around = Surroundings(
        runner.vocab_size,
        model.tokenizer,
        device,
        model.max_len,
        engine_config.max_num_seqs,
        int(memory * share) or None,
        engine_config.page_size,
        fuse=engine_config.fuse,
        kernels=engine_config.kernels,
        takes_mail=runner.chooses and (draft is None or runner.device == draft.model.device),
        hidden_states=runner.hidden_states,
        target=runner,
        extras={k: v for k, v in (("draft_model", draft), ("head", head)) if v is not None},
    )
    if config.nodes >= how.max_batch_tokens and config.static_tree is not None:
        note(f"static_tree has {config.nodes} nodes, and drafts keep the first that fit: see max_batch_tokens.")
    decode = None if model.tokenizer is None else model.tokenizer.decode
    engine = Engine(runner, engine_config, model.max_len, pages, config, around, decode)
    policy = engine.policy
    decides = isinstance(policy, AheadPolicy)  # then a rehearsal prepares all sizes
    nodes = config.nodes if config.method != "none" and not decides else 0
    runner.warm_up(nodes, config.tree or config.method in ("suffix", AUTO), engine.drafting.taps)
    if isinstance(policy, AdaptivePolicy):
        _measure(engine, policy, _store(model, runner, engine_config))
    elif isinstance(policy, AheadPolicy):
        _rehearse(engine, policy, model, _store(model, runner, engine_config, engine.drafting))
    if engine_config.record is not None:  # from here on: what was made up to measure is no traffic
        _record(engine, engine_config.record)
    return EngineLoop(engine)


def _record(engine: Any, path: str) -> None:
    from headstart.policy.recording import Recording

    recording, end = Recording(engine.policy, path), engine.at_end

    def at_end() -> None:
        end()
        recording.close()

    engine.policy, engine.at_end = recording, at_end


def _rehearse(engine: Any, policy: AheadPolicy, model: Loaded, store: Store) -> None:
    """How long steps take on this device, with each way to draft, and what drafts bring: as the last time, or measured. Else
    there are no drafts."""
    from headstart.engine import StepFailed
    from headstart.rehearse import rehearse
    from headstart.tryouts import try_out

    store.load(policy)
    try:
        if rehearse(engine, policy):
            store.save(policy)
        if try_out(engine, policy, model):
            store.save(policy)
        if policy.periods.known:
            engine.at_end = lambda: store.save(policy)  # what drafts bring is worth knowing the next time, too
    except StepFailed as error:
        policy.forget_periods()
        note(f"Drafting could not be tried on this device, so there is none: {error.__cause__!r}.")


def _measure(engine: Any, policy: AdaptivePolicy, store: Store) -> None:
    """What forwards cost on this machine: as it was the last time, or measured."""
    from headstart.policy.costs import CONTEXT, FAR_ROWS, is_still_so, measure, measure_context

    runner, slots = engine.runner, min(engine.pool.num_slots, engine.max_len)
    rows = min(64, engine.config.max_batch_tokens, slots - CONTEXT)
    with status("Measuring this machine"):
        if not (store.load(policy) and is_still_so(runner, policy.costs, rows)):
            policy.costs = measure(runner, rows)
            if rows >= FAR_ROWS:
                measure_context(runner, slots, policy.costs)
            store.save(policy)
    engine.at_end = lambda: store.save(policy)


def _store(model: Loaded, runner: Any, config: EngineConfig, drafting: Any = None) -> Store:
    """Where the costs of this model are kept, as it runs here; those of whole steps, with these drafters."""
    import platform

    import torch

    from headstart.models.builtin import cache_dir
    from headstart.policy.store import Store
    from headstart.version import VERSION

    cuda = runner.device.type == "cuda"
    where = torch.cuda.get_device_name(runner.device) if cuda else f"{platform.machine()} {platform.processor()}"
    return Store(
        cache_dir() / "costs",
        {
            "model": model.name,
            "bytes": runner.weight_bytes,
            "device": where,
            "dtype": str(runner.dtype),
            "threads": torch.get_num_threads(),
            "runner": type(runner).__name__,
            "wide": bool(config.wide_weights is not False),
            "deterministic": config.deterministic,
            "headstart": VERSION,
            "torch": torch.__version__,
            **({} if drafting is None else _about_drafts(drafting, config)),
        },
    )


def _about_drafts(drafting: Any, config: EngineConfig) -> dict[str, Any]:
    """What whole steps depend on, too."""
    c, heads = drafting.config, drafting.around.extras.values()
    weights = [sum(p.numel() for p in head.parameters()) for head in heads if hasattr(head, "parameters")]
    return {
        "drafters": {name: drafter.describe() for name, drafter in drafting.drafters.items()},
        "sizes": [c.num_speculative_tokens, c.nodes, config.max_num_seqs, config.max_batch_tokens, *weights],
    }


def _kv_memory(device: Any, spare: int) -> int:
    """Bytes that the KV pools may take when nobody says."""
    import torch

    from headstart.models.memory import free_memory

    if device.type == "cuda":
        return int((torch.cuda.mem_get_info(device)[0] - spare) * CUDA_SHARE)
    return int(free_memory() * CPU_SHARE)
