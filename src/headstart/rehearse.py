"""Steps with requests that are made up: to know how long each way to draft takes on this device, and to have its graphs ready.

The texts repeat themselves, so that whoever looks for what was there before finds it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from headstart.config import AUTO
from headstart.core import Request, RequestSpeculation, SamplingParams
from headstart.engine import Engine
from headstart.policy.ahead import HOST_MOST, AheadPolicy
from headstart.policy.costs import are_alike
from headstart.policy.periods import COMPANIES, PROMPT, Mode
from headstart.progress import bar, note

PATTERN = 8  # tokens after which a made-up text repeats itself
WARM, TIMED = 9, 15  # steps before and while times are taken
SOME = 4  # steps after which a mode has met all that it makes on first use
VISITS = (1, 2, 4)  # tokens of those who come to a mixed company: they end with the prompt, before a draft, behind one
LATE = 4  # and of one that the head joins late: it ends before a draft, too
MOST_TOKENS = 8  # that a step may bring
ALIKE = 1.15  # ratios of what is measured to what is known may differ by so much
WORDS = 4000  # tokens among which words are looked for
Mixture = tuple[int, Mode, Mode]  # how many requests; the modes of a head and of a drafter on the host


def rehearse(engine: Engine, policy: AheadPolicy) -> bool:
    """Fill in the policy's periods: plain steps, and each mode of each drafter, for 1, 2, 4, ... requests. Returns whether they
    were measured: those that the policy knows already are kept where the device is as fast as then."""
    modes = {name: policy.modes([name]) for name in engine.drafting.drafters}
    if not modes:
        return False
    policy.rehearses = True
    try:
        _prepare(engine, modes)
        sizes, words = companies(engine, modes), _words(engine)
        if not sizes:
            if not policy.periods.known:
                note(f"Texts of {engine.max_len} tokens have no room to try drafts, so there are none.")
            return False
        mixed = _mixtures(engine, modes, sizes)
        if policy.periods.known and _is_still_so(engine, policy, words, modes, sizes):
            with bar("Preparing drafts", len(sizes) * len(modes) + len(mixed), "parts") as done:
                for company, own in itertools.product(sizes, modes.values()):
                    known = [m for m in own if _fits(engine, m, company)]
                    _play(engine, policy, words, company, own[0].drafter, known, timed=False)
                    done(1)
                _mix_all(engine, policy, words, mixed, done)
            return False
        policy.forget_periods()
        with bar("Measuring this device", len(sizes) * (1 + len(modes)) + len(mixed), "parts") as done:
            for company in sizes:
                for name in (None, *modes):
                    fitting = [None] if name is None else [m for m in modes[name] if _fits(engine, m, company)]
                    for mode, seconds in _play(engine, policy, words, company, name, fitting).items():
                        policy.periods.put(mode, company, seconds)
                    done(1)
            _mix_all(engine, policy, words, mixed, done)
        return True
    finally:
        policy.rehearses, policy.ordered, engine.runner.improvises = False, (), True


def prepare(engine: Engine) -> None:
    """Have all ready that steps of any size need where a policy drafts as it was told, or nobody does: else it is made when it
    is first met. Who measures does not want to meet it."""
    if not engine.runner.repeats or isinstance(
        engine.policy, AheadPolicy
    ):  # nothing of that kind is made; it was rehearsed
        return
    config = engine.drafting.config
    nodes, depth = config.nodes if config.tree else config.num_speculative_tokens, config.num_speculative_tokens
    modes = {name: [Mode(name, nodes, depth)] for name in engine.drafting.drafters}
    _prepare(engine, modes)
    words = _words(engine)
    for company, name in itertools.product(companies(engine, modes), modes or (None,)):
        with running(engine, _made_up(engine, words, company, name)) as requests:
            _reach(engine, requests, WARM)
    engine.runner.improvises = True


def _is_still_so(
    engine: Engine, policy: AheadPolicy, words: Sequence[int], modes: dict[str, list[Mode]], sizes: Sequence[int]
) -> bool:
    """Do plain steps of the smallest and of the largest company, and those of each drafter's first mode, take as long as is
    known? They take on the speed of today."""
    if not sizes or not policy.periods.covers([m for own in modes.values() for m in own], sizes):
        return False
    ratios = []
    for company in dict.fromkeys((sizes[0], sizes[-1])):
        for name in (None, *modes):
            mode = None if name is None else modes[name][0]
            if mode is None or _fits(engine, mode, company):
                seconds = _play(engine, policy, words, company, name, [mode]).get(mode, 0.0)
                ratios.append(seconds / policy.periods.of(mode, company))
    if not are_alike(ratios, ALIKE):
        return False
    policy.periods.scale(float(np.mean(ratios)))
    return True


def _prepare(engine: Engine, modes: dict[str, list[Mode]]) -> None:
    """Have the graphs ready: with hidden states for those that read them, and without."""
    taps, reading = engine.drafting.taps, {n for n, d in engine.drafting.drafters.items() if d.needs.hidden_layers}
    every = {(m.nodes, m.branches) for own in modes.values() for m in own}
    others = {(m.nodes, m.branches) for name, own in modes.items() if name not in reading for m in own}
    work = [*engine.runner.prepare(others, ()), *(engine.runner.prepare(every, taps) if taps else ())]
    with bar("Preparing GPU graphs", len(work), "graphs") as done:
        for record in work:
            record()
            done(1)


def companies(engine: Engine, modes: dict[str, list[Mode]]) -> list[int]:
    """As many requests as run at once, as far as there is memory for all they may write here."""
    together = min(_at_a_time(engine), max([1, *(len(own) for own in modes.values())]))
    if together < 1:
        return []
    longest = PROMPT + _each() * together
    most = min(engine.config.max_num_seqs, engine.pool.num_slots // (longest + engine.config.page_size))
    most = min(most, engine.config.max_batch_tokens // 2)  # so that there are rows for prompts, too
    return sorted({n for n in COMPANIES if n <= most} | ({most} if 0 < most < COMPANIES[-1] else set()))


def _at_a_time(engine: Engine) -> int:
    """Modes that one text has room for."""
    return (engine.max_len - PROMPT - MOST_TOKENS) // _each()


def _each() -> int:
    """Tokens that a text may gain while one mode is tried."""
    return (WARM + TIMED) * MOST_TOKENS


def _fits(engine: Engine, mode: Mode, company: int) -> bool:
    return company * (1 + mode.nodes) <= engine.config.max_batch_tokens


def _play(
    engine: Engine,
    policy: AheadPolicy,
    words: Sequence[int],
    company: int,
    name: str | None,
    modes: Sequence[Mode | None],
    timed: bool = True,
) -> dict[Mode | None, float]:
    """Seconds of a step in each of these modes, one after the other, with requests for one drafter; or some steps in each, so
    that all is ready."""
    found: dict[Mode | None, float] = {}
    together = _at_a_time(engine)
    for first in range(0, len(modes), together):
        with running(engine, _made_up(engine, words, company, name)) as requests:
            policy.ordered = ()
            _reach(engine, requests, 1)
            for mode in modes[first : first + together]:
                policy.order([] if mode is None else [mode])
                seconds = [_seconds(engine) for _ in range(WARM + TIMED if timed else SOME)]
                if timed and all(r.finish_reason is None for r in requests):
                    found[mode] = float(np.median(seconds[WARM:]))
    return found


def _mixtures(engine: Engine, modes: dict[str, list[Mode]], sizes: Sequence[int]) -> list[Mixture]:
    """Companies in which a head drafts for some, in its first chains or its first trees, and another on the host for others."""
    drafters = engine.drafting.drafters
    heads = [m for name, own in modes.items() if drafters[name].needs.hidden_layers for m in _shapes(own)]
    others = [own[0] for name, own in modes.items() if own and not drafters[name].needs.hidden_layers]
    hosts = [m for m in others if not drafters[m.drafter].ahead]
    small = [n for n in sizes if 1 < n <= HOST_MOST]
    found = itertools.product(small, heads, hosts)
    return [(n, head, host) for n, head, host in found if _fits(engine, head, n) and _fits(engine, host, n)]


def _shapes(modes: Sequence[Mode]) -> list[Mode]:
    """The first that is a chain, and the first that branches."""
    return [next(own) for _, own in itertools.groupby(modes, key=lambda m: m.branches)]


def _mix_all(
    engine: Engine, policy: AheadPolicy, words: Sequence[int], mixed: Sequence[Mixture], done: Callable[[int], None]
) -> None:
    for company, head, host in mixed:
        _mix(engine, policy, words, company, head, host)
        done(1)


def _mix(engine: Engine, policy: AheadPolicy, words: Sequence[int], company: int, head: Mode, host: Mode) -> None:
    """Have all ready that such a company needs. The head drafts for all; then it rests for those that may have the other one,
    and reads by the host's hand what is computed of the others, while some come for it and go; then it joins again."""
    own, name = (company - 1) // 2, head.drafter  # of those who stay: the head alone may serve them
    stay = [*_made_up(engine, words, own, name), *_made_up(engine, words, company - 1 - own, AUTO, own)]
    with running(engine, stay) as requests:
        policy.order([])
        _reach(engine, requests, 1)
        _go_on(engine, policy, head)
        policy.order([host, head])
        for tokens in VISITS:
            _reach(engine, _come(engine, words, requests, name, tokens), tokens)
        policy.order([host])
        late = _come(engine, words, requests, name, LATE)
        _reach(engine, late, 1)
        policy.order([host, head])
        _reach(engine, late, LATE)
        _go_on(engine, policy, head)


def _come(engine: Engine, words: Sequence[int], requests: list[Request], name: str, tokens: int) -> list[Request]:
    """One more for this drafter, that stays for so many tokens."""
    more = [*_made_up(engine, words, 1, name, len(requests), tokens)]
    requests += more
    for request in more:
        engine.add(request)
    return more


def _go_on(engine: Engine, policy: AheadPolicy, mode: Mode) -> None:
    """Some steps in this mode."""
    policy.order([mode])
    for _ in range(SOME):
        engine.step()


@contextlib.contextmanager
def running(engine: Engine, made_up: Iterable[Request]) -> Iterator[list[Request]]:
    """These come, and leave nothing behind."""
    requests = list(made_up)
    for request in requests:
        engine.add(request)
    try:
        yield requests
    finally:
        for request in requests:
            engine.abort(request)
        while not engine.idle:
            engine.step()


def _reach(engine: Engine, requests: Sequence[Request], tokens: int) -> None:
    """Until each of them has so many, or has ended."""
    while any(r.num_output < tokens and r.finish_reason is None for r in requests):
        engine.step()


def _seconds(engine: Engine) -> float:
    begin = time.perf_counter()
    engine.step()
    return time.perf_counter() - begin


def _words(engine: Engine) -> list[int]:
    """Some tokens. Whole words where there is text: pieces of characters take longer to show."""
    decode, vocab = engine.delivery.decode, engine.runner.vocab_size
    some = [(997 * k + 11) % vocab for k in range(min(vocab, WORDS))]
    if decode is None:
        return some
    return [t for t in some if (text := decode([t], True).strip()).isascii() and text.isalpha()] or some


def _made_up(
    engine: Engine, words: Sequence[int], company: int, name: str | None, first: int = 0, tokens: int | None = None
) -> Iterator[Request]:
    """Requests for one drafter, or for none; their numbers begin with `first`, and no two of them are alike. They go on until
    they have so many tokens, or for ever."""
    speculation = RequestSpeculation(enabled=name is not None, method=name)
    tokens = tokens or engine.max_len - PROMPT - 1
    for i in range(first, first + company):
        pattern = [words[(29 * i + k + i // len(words)) % len(words)] for k in range(PATTERN)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        yield Request((pattern * (PROMPT // PATTERN + 1))[:PROMPT], params, seed=i, speculation=speculation)
