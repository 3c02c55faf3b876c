"""The Python API as a user meets it: generate, chat, stream, asyncio, n, stop strings, errors, closing."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from headstart import LLM, BadInput, ConfigError, Draft, Drafter, ModelError, RequestFailed, SamplingParams, register
from headstart.llm import _Inbox, _Mailbox
from headstart.loop import YOUNG
from tests import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TEXTS = ["the quick brown", "a stone bridge over", "numbers like 1 2"]


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny.loaded(), speculative={"method": "ngram", "prompt_lookup_min": 1}, kv_memory=1 << 24) as made:
        yield made
        assert made.engine.idle
        made.engine.check_integrity()


def test_generate_takes_texts_and_token_ids(llm) -> None:
    by_text = llm.generate(TEXTS, GREEDY)
    by_ids = llm.generate([llm.tokenizer.encode(t) for t in TEXTS], GREEDY)
    assert [o.token_ids for o in by_text] == [o.token_ids for o in by_ids]
    assert [o.prompt for o in by_text] == TEXTS and by_ids[0].prompt is None
    one = llm.generate(TEXTS[0], GREEDY)
    assert len(one) == 1 and one[0].text == by_text[0].text
    assert llm.generate(llm.tokenizer.encode(TEXTS[0]), GREEDY)[0].token_ids == one[0].token_ids
    for o in by_text:
        assert o.text == llm.tokenizer.decode(o.token_ids) and o.finish_reason == "length"
        assert o.stats.tokens == 24 and o.stats.steps <= 24 and o.stats.time_target > 0


def test_parameters_per_prompt(llm) -> None:
    outs = llm.generate(
        TEXTS[:2], [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)]
    )
    assert [len(o.token_ids) for o in outs] == [3, 5]
    with pytest.raises(BadInput, match="2 prompts but 1"):
        llm.generate(TEXTS[:2], [GREEDY])


def test_chat_goes_through_the_template(llm) -> None:
    messages = [{"role": "user", "content": "the birds sing"}]
    out = llm.chat(messages, GREEDY)[0]
    want = llm.tokenizer.encode("<|user|>the birds sing<|end|><|assistant|>")
    assert out.prompt_token_ids == want
    assert out.token_ids == llm.generate(want, GREEDY)[0].token_ids
    assert [o.text for o in llm.chat([messages, messages], GREEDY)] == [out.text] * 2


def test_stream_adds_up_to_generate(llm) -> None:
    want = llm.generate(TEXTS[0], GREEDY)[0]
    chunks = list(llm.stream(TEXTS[0], GREEDY))
    assert "".join(c.text for c in chunks) == want.text
    assert [t for c in chunks for t in c.token_ids] == want.token_ids
    assert all(len(c.from_draft) == len(c.token_ids) for c in chunks)
    assert sum(sum(c.from_draft) for c in chunks) == want.stats.accepted
    assert chunks[-1].finish_reason == "length" and chunks[-1].completion.text == want.text


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_what_was_forgotten_is_asked_as_if_for_the_first_time(method) -> None:
    def ask() -> tuple[list[int], int, int, int]:
        out = made.generate(prompt, params)[0]
        return out.token_ids, out.stats.steps, out.stats.drafted, out.stats.cached_prompt_tokens

    prompt, params = list(range(5, 45)), SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    draft = tiny.loaded(seed=9) if method == "draft_model" else None
    with LLM(tiny.loaded(), speculative={"method": method}, draft=draft, kv_memory=1 << 24) as made:
        made.forget()  # before anything was asked
        first, again = ask(), ask()
        made.forget()
        made.engine.check_integrity()
        assert ask() == first and first[3] == 0
        assert again[0] == first[0] and again[3] > 0, "the same text, with a prefix that was there"
        if method == "suffix":
            assert again[1] < first[1], "and a text that was remembered"
    made.forget()  # behind its end, too


def test_leaving_a_stream_cancels_the_request(llm) -> None:
    stream = llm.stream(TEXTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate(TEXTS[0], GREEDY)  # the loop went round: the cancellation was seen
    assert llm.engine.idle and not llm.engine.pool.tables


def test_n_completions_differ_in_their_seeds(llm) -> None:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    out, again = llm.generate(TEXTS[0], params)[0], llm.generate(TEXTS[0], params)[0]
    texts = [tuple(c.token_ids) for c in out.completions]
    assert len(set(texts)) == 4 and texts == [tuple(c.token_ids) for c in again.completions]
    alone = llm.generate(
        TEXTS[0], SamplingParams(temperature=1.0, max_tokens=12, seed=out.completions[2].seed, ignore_eos=True)
    )
    assert tuple(alone[0].token_ids) == texts[2]


def test_prompt_logprobs_are_told_once_for_all_completions(llm) -> None:
    """Only the first of n requests computes the whole prompt for them; the others may share its pages."""
    params = SamplingParams(n=3, temperature=1.0, max_tokens=2, seed=5, prompt_logprobs=1, ignore_eos=True)
    job = llm._job(TEXTS[0], params, None)
    assert [r.params.prompt_logprobs for r in job.requests] == [1, None, None]
    out = llm.generate(TEXTS[0], params)[0]
    assert len(out.completions) == 3 and len(out.prompt_logprobs) == len(out.prompt_token_ids)


def test_no_seed_is_another_text_each_time_and_tells_its_seed(llm) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    a, b = llm.generate(TEXTS[0], params)[0], llm.generate(TEXTS[0], params)[0]
    assert a.token_ids != b.token_ids
    again = llm.generate(
        TEXTS[0], SamplingParams(temperature=1.0, max_tokens=12, seed=a.completions[0].seed, ignore_eos=True)
    )[0]
    assert again.token_ids == a.token_ids


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_span_tokens_and_blocks(llm, include) -> None:
    """Every cut of the text is a stop string once; with and without speculation, streamed and whole."""
    whole = llm.generate(TEXTS[0], GREEDY)[0]
    for start in range(0, max(1, len(whole.text) - 6), 3):
        stop = whole.text[start : start + 5]
        if "\ufffd" in stop or not stop:
            continue
        params = SamplingParams(
            temperature=0.0, max_tokens=24, ignore_eos=True, stop=[stop], include_stop_str_in_output=include
        )
        outs = [llm.generate(TEXTS[0], params, speculative=s)[0] for s in (None, False, "suffix")]
        at = whole.text.find(stop)
        want = whole.text[: at + len(stop) * include]
        for o in outs:
            assert o.text == want and o.finish_reason == "stop" and o.completions[0].stop_reason == stop
            assert o.token_ids == outs[0].token_ids
        assert "".join(c.text for c in llm.stream(TEXTS[0], params)) == want


def test_bad_words_by_text(llm) -> None:
    whole = llm.generate(TEXTS[0], GREEDY)[0]
    word = next(llm.tokenizer.decode([t]) for t in whole.token_ids if llm.tokenizer.decode([t]).strip().isalpha())
    out = llm.generate(TEXTS[0], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, bad_words=[word]))[0]
    banned = llm.tokenizer.encode(word, special=False)
    assert len(banned) > 1 or banned[0] not in out.token_ids


def test_per_request_switch(llm) -> None:
    on, off = (llm.generate(TEXTS, GREEDY, speculative=s) for s in (None, {"enabled": False}))
    assert [o.token_ids for o in on] == [o.token_ids for o in off]
    assert all(o.stats.drafted == 0 for o in off)


def test_asyncio(llm) -> None:
    want = [o.token_ids for o in llm.generate(TEXTS, GREEDY)]

    async def all_at_once():
        return await asyncio.gather(*(llm.agenerate(t, GREEDY) for t in TEXTS))

    async def streamed():
        return [t async for c in llm.astream(TEXTS[0], GREEDY) for t in c.token_ids]

    async def cancelled():
        task = asyncio.create_task(llm.agenerate(TEXTS[0], SamplingParams(max_tokens=400, ignore_eos=True)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await llm.achat([{"role": "user", "content": "hi"}], GREEDY)).text

    assert [o.token_ids for o in asyncio.run(all_at_once())] == want
    assert asyncio.run(streamed()) == want[0]
    assert asyncio.run(cancelled())
    assert llm.engine.idle


def test_an_event_loop_that_ends_early_does_not_take_the_engine_along(llm) -> None:
    """The loop is closed while its request still runs: the next chunk finds nobody, and everyone else goes on."""
    loop = asyncio.new_event_loop()
    stream = llm.astream(TEXTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    loop.run_until_complete(stream.__anext__())
    loop.close()
    assert llm.generate(TEXTS[0], GREEDY)[0].finish_reason == "length"
    assert llm.engine.idle and not llm.engine.pool.tables


def test_many_prompts_are_streamed_as_one(llm) -> None:
    async def streamed() -> list[list[int]]:
        got: list[list[int]] = [[] for _ in TEXTS]
        async for i, chunk in llm.astream_all(TEXTS, GREEDY):
            got[i] += chunk.token_ids
        return got

    assert asyncio.run(streamed()) == [o.token_ids for o in llm.generate(TEXTS, GREEDY)]


def test_the_engine_lets_an_event_loop_send_first(llm, monkeypatch) -> None:
    """Whoever listens has seen a step's tokens before the next step begins."""
    monkeypatch.setattr("headstart.llm.MOST_WAIT", 30.0)  # however busy this machine is
    seen, known = 0, []
    step = llm.engine.step

    async def listen() -> None:
        nonlocal seen
        async for chunk in llm.astream(TEXTS[0], SamplingParams(max_tokens=12, ignore_eos=True), speculative=False):
            seen += len(chunk.token_ids)

    def watched() -> list[Any]:
        known.append(seen)
        return step()

    llm.engine.step = watched
    try:
        asyncio.run(listen())
    finally:
        del llm.engine.step
    assert known == list(range(12))


def test_an_event_loop_that_is_busy_is_waited_for_once(monkeypatch) -> None:
    monkeypatch.setattr("headstart.llm.MOST_WAIT", 0.01)
    told: list[Any] = []

    async def main() -> None:
        box, inbox = _Mailbox(told), _Inbox()
        waits: list[float] = []
        wait = box._sent.wait
        monkeypatch.setattr(box._sent, "wait", lambda most: waits.append(most) or wait(most))
        for _ in range(3):  # the loop runs this, and nothing else
            box.put(inbox, (None, None))
            box.wait()
        assert told == [box] and len(waits) == 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(inbox.events) == 3
        box.put(inbox, (None, None))
        box.wait()
        assert told == [box, box] and len(waits) == 2, "it came back"

    asyncio.run(main())


def test_numpy_prompts(llm) -> None:
    ids = llm.tokenizer.encode(TEXTS[0])
    assert llm.generate(np.array(ids), GREEDY)[0].token_ids == llm.generate(ids, GREEDY)[0].token_ids


def test_threads_may_share_one_llm(llm) -> None:
    want = [o.token_ids for o in llm.generate(TEXTS, GREEDY)]
    got: dict[int, list[int]] = {}
    workers = [
        threading.Thread(target=lambda i=i: got.__setitem__(i, llm.generate(TEXTS[i], GREEDY)[0].token_ids))
        for i in range(3)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert [got[i] for i in range(3)] == want


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "No prompt"),
        ([[]], "empty"),
        ([5, "x"], "token ids"),
        ([10**6], "vocabulary"),
        ("a " * 900, "Shorten"),
    ],
)
def test_bad_prompts(llm, prompt, words) -> None:
    with pytest.raises(BadInput, match=words):
        llm.generate(prompt, GREEDY)
    assert llm.generate(TEXTS[0], GREEDY)[0].text  # nothing is lost


def test_mistakes_of_a_caller_are_one_sentence(llm) -> None:
    with pytest.raises(BadInput, match="takes a list of messages"):
        llm.chat("hello", GREEDY)
    with pytest.raises(BadInput, match="should be SamplingParams"):
        llm.generate(TEXTS[0], {"temperature": 0})
    with pytest.raises(ConfigError, match="this model is loaded"):
        LLM(tiny.loaded(), dtype="float16")
    with pytest.raises(ConfigError, match="not draft_model"):
        LLM(tiny.loaded(), speculative="ngram", draft=tiny.loaded())
    rows = np.array([llm.tokenizer.encode(TEXTS[0])] * 2)
    assert len({tuple(o.token_ids) for o in llm.generate(rows, GREEDY)}) == 1


def test_a_broken_step_fails_its_own_requests_only() -> None:
    with LLM(tiny.loaded(), max_num_seqs=1, kv_memory=1 << 22) as llm:
        forward, calls = llm.engine.runner.forward, []

        def once_broken(batch):
            calls.append(1)
            return 1 / 0 if len(calls) == 2 else forward(batch)

        llm.engine.runner.forward = once_broken
        got: dict[int, object] = {}

        def ask(i: int) -> None:
            try:
                got[i] = llm.generate(TEXTS[i], GREEDY)[0].token_ids
            except RequestFailed as error:
                got[i] = error

        workers = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        assert sum(isinstance(g, RequestFailed) for g in got.values()) == 1
        assert sum(isinstance(g, list) for g in got.values()) == 2
        llm.engine.check_integrity()


def ask_all(llm: LLM, count: int) -> list[object]:
    """All at once, from threads of their own: token ids, or what was told instead."""
    got: dict[int, object] = {}

    def ask(i: int) -> None:
        try:
            got[i] = llm.generate(TEXTS[i % len(TEXTS)], GREEDY)[0].token_ids
        except RequestFailed as error:
            got[i] = error

    workers = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    return [got[i] for i in range(count)]


def test_an_engine_that_breaks_between_steps_is_started_again() -> None:
    with LLM(tiny.loaded(), max_num_seqs=2, kv_memory=1 << 22) as llm:
        want = [llm.generate(TEXTS[i % len(TEXTS)], GREEDY)[0].token_ids for i in range(6)]
        deliver, calls = llm.engine._deliver, []

        def once_broken():
            calls.append(1)
            return 1 / 0 if len(calls) == 3 else deliver()

        llm.engine._deliver = once_broken
        got = ask_all(llm, 6)
        lost = [i for i, g in enumerate(got) if isinstance(g, RequestFailed)]
        assert 1 <= len(lost) <= 2 and all(got[i] == want[i] for i in range(6) if i not in lost)
        assert llm.health.alive and llm.health.restarts == 1 and llm.health.last_error == "ZeroDivisionError"
        llm.engine.check_integrity()
        assert llm.engine.idle


def test_an_engine_that_breaks_again_and_again_says_so() -> None:
    with LLM(tiny.loaded(), max_num_seqs=1, kv_memory=1 << 22) as llm:
        llm.engine._deliver = lambda: 1 / 0
        got = ask_all(llm, 8)
        assert all(isinstance(g, RequestFailed) for g in got), "and nobody waits for ever"
        assert not llm.health.alive and llm.health.restarts == 5
        with pytest.raises(RequestFailed, match="closed"):
            llm.generate(TEXTS[0], GREEDY)


def test_one_bad_prompt_does_not_leave_the_others_running(llm) -> None:
    with pytest.raises(BadInput):
        llm.generate([TEXTS[0], ""], SamplingParams(max_tokens=400, ignore_eos=True))
    llm.generate(TEXTS[0], GREEDY)
    assert llm.engine.idle


def test_a_drafter_of_ones_own_by_name() -> None:
    @register("echo")
    class Echo(Drafter):
        def propose(self, view):
            return Draft.chains([r.tokens[-r.budget :] for r in view.requests])

    with LLM(tiny.loaded(), speculative={"method": "echo"}, kv_memory=1 << 24) as own:
        out = own.generate(TEXTS, GREEDY)
        plain = own.generate(TEXTS, GREEDY, speculative=False)
    assert [o.token_ids for o in out] == [o.token_ids for o in plain]
    assert set(out[0].stats.by_drafter) == {"echo"}


def test_config_mistakes_are_said_before_a_model_is_loaded() -> None:
    for value, words in [
        ({"method": "ngrm"}, "Did you mean 'ngram'"),
        ({"metod": "ngram"}, "Did you mean 'method'"),
        ({"method": "no.such.Drafter"}, "cannot be imported"),
        ({"method": "dflash"}, "not available yet"),
        ({"method": "eagle3"}, "needs its checkpoint"),
        ({"method": "eagle3", "model": "/no/such/head"}, "There is no folder"),
        ("{broken", "not valid JSON"),
    ]:
        with pytest.raises(ConfigError, match=words):
            LLM("/nowhere/at/all", speculative=value)
    with pytest.raises(ModelError, match="There is no model"):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match="needs a model"):
        LLM(tiny.loaded(), speculative="draft_model")
    with pytest.raises(ConfigError, match="two are the least"):
        LLM(tiny.loaded(), kv_memory=100)


def test_no_effect_options_are_said(capsys) -> None:
    LLM(tiny.loaded(), speculative={"method": "ngram", "n_reuse": 3, "n_max": 2}, kv_memory=1 << 22).close()
    assert "'n_reuse' has no effect here" in capsys.readouterr().err


def test_closed_means_closed() -> None:
    made = LLM(tiny.loaded(), kv_memory=1 << 22)
    made.generate(TEXTS[0], GREEDY)
    made.close()
    made.close()
    with pytest.raises(Exception, match="closed"):
        made.generate(TEXTS[0], GREEDY)


def test_from_a_folder_and_a_process_that_ends_cleanly(tmp_path) -> None:
    tiny.folder(tmp_path / "m")
    code = (
        "from headstart import LLM, SamplingParams\n"
        f"llm = LLM({str(tmp_path / 'm')!r}, kv_memory=1 << 22)\n"
        "s = llm.stream('the quick', SamplingParams(max_tokens=300, ignore_eos=True))\n"
        "print(next(s).token_ids)\n"  # leaves with a request running and no close()
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_is_recorded_and_replayed(tmp_path) -> None:
    from headstart.traffic import read_trace

    path = tmp_path / "trace.jsonl"
    with LLM(tiny.loaded(), speculative={"method": "ngram", "prompt_lookup_min": 1}, record=str(path)) as llm:
        outs = llm.generate(
            [[5, 6, 7, 5, 6], [8, 9, 8, 9, 8]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        )
    trace = read_trace(path)
    assert sorted(r.output_ids for r in trace.requests) == sorted(tuple(o.token_ids) for o in outs)
    assert any(r.seen.get("ngram") for r in trace.requests)
    with pytest.raises(BadInput, match="exists already"):
        LLM(tiny.loaded(), record=str(path))
    with pytest.raises(BadInput, match="no folder"):
        LLM(tiny.loaded(), record=str(tmp_path / "away" / "t.jsonl"))


def test_the_collector_looks_less_often_while_an_engine_runs() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with LLM(tiny.loaded(), kv_memory=1 << 22) as llm:
            llm.generate([3, 4, 5], SamplingParams(max_tokens=2))
            assert gc.get_threshold() == (YOUNG, 10, 10)
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)
