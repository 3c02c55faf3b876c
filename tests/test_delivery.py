"""From tokens to what a listener gets; and an engine is not idle until it has told everything."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.core import Request, SamplingParams
from headstart.delivery import Delivery, Parcel
from headstart.engine import StepFailed
from headstart.errors import BadInput
from tests import tiny
from tests.harness import engine, request, run

END, HIDDEN = 0, 1  # tokens that end a text, and that only some want to see
BYTES = {
    ord(c): bytes([b]) for c, b in zip("ÄÖÜ", "🙂é".encode()[:3], strict=True)
}  # tokens that are part of a character


def decode(ids: Any, skip_special: bool) -> str:
    """A token is the character of its number; special ones are written out, or left out."""
    special = {END: b"<end>", HIDDEN: b"<hidden>"}
    pieces = [b"" if i in special and skip_special else special.get(i, BYTES.get(i, chr(i).encode())) for i in ids]
    return b"".join(pieces).decode(errors="replace")


def tokens(text: str) -> list[int]:
    return [ord(c) for c in text]


class Told:
    """One request, told token by token as the engine would."""

    def __init__(self, prompt: str = "say ", **params: Any) -> None:
        self.delivery = Delivery(decode)
        self.request = Request(tokens(prompt), SamplingParams(**params), seed=1, eos_ids=frozenset([END]))
        self.delivery.add(self.request)
        self.text = ""

    def step(self, new: list[int], finish: str | None = None) -> str | None:
        """These tokens in one step. Returns the stop string that ended it."""
        stop, kept = None, 0
        for token in new:
            kept += 1
            self.request.tokens.append(token)
            if (stop := self.delivery.stops(self.request, token)) is not None:
                finish = "stop"
                break
        self.request.finish_reason, self.request.stop_reason = finish, stop
        chunk = self.delivery.chunk(Parcel(self.request, new[:kept], [False] * kept, self.request.finish_reason))
        self.text += chunk.text
        self.last = chunk
        return stop


# ------------------------------------------------------------------ text
def test_text_comes_step_by_step() -> None:
    told = Told()
    told.step(tokens("hel"))
    assert told.last.text == "hel" and told.last.finish_reason is None and told.last.token_ids == tokens("hel")
    told.step(tokens("lo"), "length")
    assert (told.text, told.last.finish_reason, told.last.stop_reason) == ("hello", "length", None)


def test_without_a_decoder_there_are_tokens_and_no_text() -> None:
    delivery, r = Delivery(None), Request([5], SamplingParams(), seed=1)
    delivery.add(r)
    r.tokens.append(9)
    assert delivery.stops(r, 9) is None and not delivery.streams
    chunk = delivery.chunk(Parcel(r, [9], [True], r.finish_reason))
    assert (chunk.text, chunk.token_ids, chunk.from_draft) == ("", [9], [True])


def test_what_a_chunk_says_of_the_request_does_not_change_later() -> None:
    told = Told()
    told.request.stats.tokens = 1
    told.step(tokens("a"))
    told.request.stats.tokens = 2
    assert told.last.stats.tokens == 1


def test_an_unfinished_character_waits_and_the_end_shows_it_as_it_is() -> None:
    told = Told()
    told.step([*tokens("a"), *tokens("ÄÖ")])
    assert told.text == "a"
    told.step(tokens("Ü"), "length")
    assert told.text.startswith("a\ufffd") and told.request.id not in told.delivery.streams


# ------------------------------------------------------------------ stop strings
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_steps_ends_the_text(include: bool) -> None:
    told = Told(stop=["END"], include_stop_str_in_output=include)
    assert told.step(tokens("one E")) is None and told.text == "one "  # it could become a stop string
    assert told.step(tokens("Nx")) is None and told.text == "one ENx"
    assert told.step(tokens("EN")) is None
    assert told.step(tokens("D and more")) == "END"
    assert told.text == ("one ENxEND" if include else "one ENx")
    assert told.last.token_ids == tokens("D") and told.last.stop_reason == "END"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    told = Told(stop=["END"])
    told.step(tokens("the EN"))
    assert told.text == "the "
    told.step([END], "stop")
    assert told.text == "the EN"


def test_a_stop_string_in_the_prompt_is_no_stop() -> None:
    told = Told("say EN", stop=["END"])
    assert told.step(tokens("Dear")) is None and told.text == "Dear"


def test_before_min_tokens_a_stop_string_is_text() -> None:
    told = Told(stop=["x"], min_tokens=3)
    assert told.step(tokens("ax")) is None
    assert told.step(tokens("bcx")) == "x"
    assert told.text == "axbc"


def test_a_request_without_stop_strings_is_never_asked_for_its_text() -> None:
    told = Told()
    assert told.delivery.stops(told.request, ord("x")) is None
    assert told.delivery.streams[told.request.id].text == ""


def test_tokens_without_text_for_those_who_want_no_more() -> None:
    told = Told(detokenize=False)
    told.step(tokens("ab"))
    told.step(tokens("c"), "length")
    assert (told.text, told.last.finish_reason, told.last.token_ids) == ("", "length", tokens("c"))
    with pytest.raises(BadInput, match="stop strings are found in the text"):
        SamplingParams(detokenize=False, stop="x")


# ------------------------------------------------------------------ special tokens
@pytest.mark.parametrize("stop", [[], ["never"]])
@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        (dict(skip_special_tokens=False), "a<hidden>b<end>"),
        (dict(stop_token_ids=[END]), "ab"),
        (dict(stop_token_ids=[END], skip_special_tokens=False), "a<hidden>b<end>"),
        (dict(stop_token_ids=[ord("b")]), "ab"),
    ],
)
def test_special_tokens_show_to_those_who_want_them(params: dict[str, Any], text: str, stop: list[str]) -> None:
    told = Told(stop=stop, **params)
    told.step([ord("a"), HIDDEN])
    told.step([ord("b"), END], "stop")
    assert told.text == text


def test_the_token_that_ends_a_text_is_no_part_of_it_whatever_it_spells() -> None:
    told = Told()
    told.request.eos_ids = frozenset(tokens("!"))
    told.step(tokens("hi!"), "stop")
    assert told.text == "hi"


# ------------------------------------------------------------------ leaving
def test_the_last_chunk_and_forget_leave_nothing_behind() -> None:
    told = Told()
    told.step(tokens("a"))
    assert told.delivery.streams
    told.step(tokens("b"), "length")
    assert not told.delivery.streams
    other = Told()
    other.delivery.forget(other.request)
    other.delivery.forget(other.request)
    assert not other.delivery.streams


# ------------------------------------------------------------------ the engine
@pytest.mark.parametrize("how", [None, "ngram"])
def test_an_engine_is_not_idle_until_everything_is_told(how: str | None) -> None:
    e = engine(tiny.model(), how)
    assert e.idle
    rs = [request(p, max_tokens=n, seed=i) for i, (p, n) in enumerate(zip(tiny.prompts(3), (1, 4, 9), strict=True))]
    told: dict[str, list[int]] = {r.id: [] for r in rs}
    ended: dict[str, str] = {}
    for r in rs:
        e.add(r)
    while len(ended) < 3:
        assert not e.idle
        for r, chunk in e.step():
            assert r.id not in ended, "a request went on after its end"
            told[r.id] += chunk.token_ids
            if chunk.finish_reason:
                ended[r.id] = chunk.finish_reason
    assert e.idle or (e.step() == [] and e.idle)  # a forward of nobody may still be on its way
    assert told == {r.id: r.output for r in rs} and ended == {r.id: r.finish_reason for r in rs}


def test_the_engine_shows_the_text_of_its_tokens() -> None:
    e = engine(tiny.model())
    e.delivery = Delivery(lambda ids, skip: "".join(chr(1000 + t) for t in ids))
    want = run(engine(tiny.model()), [request(tiny.prompts(1)[0], max_tokens=8)])[0]
    stop = chr(1000 + want[5])
    r, text = request(tiny.prompts(1)[0], max_tokens=8, stop=[stop]), ""
    e.add(r)
    while not e.idle:
        text += "".join(chunk.text for _, chunk in e.step())
    assert r.output == want[: want.index(want[5]) + 1] and r.stop_reason == stop
    assert text == "".join(chr(1000 + t) for t in r.output[:-1]) and not e.delivery.streams


def test_a_cancelled_request_is_told_nothing_more() -> None:
    e = engine(tiny.model())
    rs = [request(p, max_tokens=20) for p in tiny.prompts(2)]
    for r in rs:
        e.add(r)
    e.step()
    e.abort(rs[0])
    heard = []
    while not e.idle:
        heard += [r for r, _ in e.step()]
    assert rs[0] not in heard and rs[1] in heard


def test_an_engine_whose_step_broke_is_idle_once_its_requests_are_gone(monkeypatch) -> None:
    e = engine(tiny.model())
    e.add(request(tiny.prompts(1)[0]))
    monkeypatch.setattr(e.runner, "forward", lambda batch: 1 / 0)
    with pytest.raises(StepFailed) as caught:
        e.step()
    assert not e.idle
    for r in caught.value.requests:
        e.abort(r)
    assert e.idle


def test_what_waited_behind_a_failed_step_ends_only_once() -> None:
    """Two parcels of one request in one delivery: the first tells its own tokens, the second the end."""
    delivery, r = Delivery(lambda ids, skip: "".join(chr(96 + t) for t in ids)), Request([1], SamplingParams(), seed=1)
    delivery.add(r)
    first, last = Parcel(r, [2], [False]), Parcel(r, [3], [False], "length")
    r.finish_reason = "length"
    chunks = [delivery.chunk(p) for p in (first, last)]
    assert [(c.text, c.finish_reason) for c in chunks] == [("b", None), ("c", "length")] and not delivery.streams


def test_a_text_that_cannot_be_made_is_its_own_request_s_trouble() -> None:
    def decode(ids, skip):
        if 13 in ids:
            raise ValueError("no such character")
        return "x" * len(ids)

    e = engine(tiny.model())
    e.delivery.decode = decode
    good, bad = request([5, 6, 7], max_tokens=4), request([5, 6, 13], max_tokens=4)
    e.add(good)
    e.add(bad)
    events = []
    while not e.idle:
        events += e.step()
    assert [type(x) for r, x in events if r is bad] == [ValueError]
    assert good.finish_reason is not None and bad.finish_reason == "abort" and not e.delivery.streams
    assert "".join(x.text for r, x in events if r is good)
