"""Answers of a given form: they have it, they are the same with drafts and without, and wrong forms are one sentence."""

from __future__ import annotations

import builtins
import itertools
import json
import re

import pytest

from headstart import LLM, SamplingParams
from headstart.config import EngineConfig, parse_speculative
from headstart.core import Request, StructuredOutputs, Tree
from headstart.errors import BadInput, RequestFailed
from headstart.grammar import Grammars
from headstart.llm import start_engine
from headstart.models.tokenizer import Tokenizer
from tests import tiny
from tests.harness import run

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}  # fmt: skip
LISTED = {"x-guidance": {"whitespace_flexible": False}} | SCHEMA
FORMS = {
    "regex": ({"regex": r"[a-c]{2,6}-[0-9]{3}"}, lambda t: re.fullmatch(r"[a-c]{2,6}-[0-9]{3}", t)),
    "choice": ({"choice": ["the river", "the ri", 'say "so"']}, lambda t: t in ("the river", "the ri", 'say "so"')),
    "lark": ({"grammar": 'start: "a" ("b" | "the ")+ "c"'}, lambda t: re.fullmatch(r"a(b|the )+c", t)),
    "gbnf": ({"grammar": 'root ::= "x" [0-4] [0-4]? "y"'}, lambda t: re.fullmatch("x[0-4][0-4]?y", t)),
    "schema": ({"json": LISTED}, lambda t: set(json.loads(t)) == {"name", "sizes"}),
}
PROMPT = "the quick brown fox jumps over the quick brown fox"


@pytest.fixture(scope="module")
def model():
    return tiny.loaded()


@pytest.fixture(scope="module")
def grammars(model) -> Grammars:
    return Grammars(model.tokenizer, len(tiny.tokenizer()), [0])


def answer(llm: LLM, form: dict, **params) -> tuple[str, str]:
    options = {"temperature": 0.0, "max_tokens": 60, "seed": 3} | params
    [out] = llm.generate(PROMPT, SamplingParams(structured_outputs=form, **options))
    return out.text, out.finish_reason


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("drafter", ["RandomTrees", "AlwaysWrong", "OverBudget", "EndsInEos"])
def test_an_answer_has_its_form_whoever_drafts(model, name: str, drafter: str) -> None:
    form, fits = FORMS[name]
    spec = {"method": f"tests.tiny.{drafter}", "num_speculative_tokens": 5}
    with LLM(model, speculative=None) as plain, LLM(model, speculative=spec) as drafted:
        ended = 0
        for temperature, seed in itertools.product((0.0, 1.0), (1, 2, 3)):
            texts = {answer(llm, form, temperature=temperature, seed=seed) for llm in (plain, drafted)}
            assert len(texts) == 1
            text, reason = texts.pop()
            ended += reason == "stop"
            assert reason == "length" or fits(text), text
        assert ended, "at least one came to its end"


def test_drafts_that_fit_are_accepted_and_others_are_not_verified(model) -> None:
    """n-grams propose "abab..."; the form wants digits now and then."""
    form = {"regex": "(ab){6}7(ab){6}7(ab){6}"}
    with LLM(model, speculative={"method": "ngram", "num_speculative_tokens": 4}) as llm:
        [out] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=60, structured_outputs=form))
    stats = out.completions[0].stats
    assert out.text == "ab" * 6 + "7" + "ab" * 6 + "7" + "ab" * 6 and stats.accepted >= 8
    assert stats.accepted == stats.drafted, "only one token is allowed at each place, so what fits is right"


@pytest.mark.parametrize("method", ["draft_model", "rejection"])
def test_a_draft_model_drafts_within_the_form(model, method: str) -> None:
    helper = tiny.loaded(seed=0)
    spec = {"method": "draft_model", "model": "given", "num_speculative_tokens": 3}
    spec |= {"verification": "rejection"} if method == "rejection" else {}
    with LLM(model, speculative=spec, draft=helper) as llm:
        for seed in range(4):
            [out] = llm.generate(
                PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=60, structured_outputs=FORMS["regex"][0])
            )
            assert FORMS["regex"][1](out.text)
            assert out.completions[0].stats.accepted > 0


@pytest.mark.parametrize("options", [{}, {"tree": True}, {"policy": "adaptive"}, {"verification": "rejection"}])
def test_a_head_that_knows_none_of_the_allowed_tokens_drafts_nothing(model, options) -> None:
    """Its vocabulary has no digit, and the form wants some."""
    words = Tokenizer(tiny.tokenizer())
    digits = {words.encode(d, special=False)[0] for d in "0123456789"}
    head = tiny.eagle(model.model.config, (0, 1, 2), [t for t in range(len(tiny.tokenizer())) if t not in digits])
    spec, _ = parse_speculative({"method": "eagle3", "model": "given", "num_speculative_tokens": 3} | options)
    loop = start_engine(model, spec, EngineConfig(max_num_seqs=2), head=head)
    form = Grammars(model.tokenizer, len(tiny.tokenizer()), [0]).form(StructuredOutputs(regex="ab[0-9]{4}ab[0-9]{4}"))
    params = SamplingParams(temperature=1.0 if "verification" in options else 0.0, max_tokens=40)
    request = Request(words.encode(PROMPT), params, 3, eos_ids=frozenset([0]), form=form)
    assert len(run(loop.engine, [request])[0]) > 6
    assert re.fullmatch("ab[0-9]{4}ab[0-9]{4}", words.decode(request.output)), words.decode(request.output)


def test_a_grammar_that_becomes_too_large_fails_its_own_request(model, monkeypatch) -> None:
    class Broken:
        def __init__(self, matcher) -> None:
            self.matcher, self.count = matcher, 0

        def __getattr__(self, name: str):
            return getattr(self.matcher, name)

        def is_error(self) -> bool:
            self.count += 1
            return self.count > 2

        def get_error(self) -> str:
            return "too complex"

    form = Grammars.form
    with LLM(model, speculative=None) as llm:

        def breaking(self, wanted):
            made = form(self, wanted)
            made._matcher = Broken(made._matcher)
            return made

        monkeypatch.setattr(Grammars, "form", breaking)
        with pytest.raises(RequestFailed, match="too complex"):
            answer(llm, FORMS["regex"][0])
        monkeypatch.setattr(Grammars, "form", form)
        assert FORMS["regex"][1](answer(llm, FORMS["regex"][0])[0])


def test_forms_of_many_requests_at_once_do_not_meet(model) -> None:
    with LLM(model, speculative={"method": "tests.tiny.RandomTrees"}, max_num_seqs=4) as llm:
        names = [*FORMS, *FORMS]
        params = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=60, structured_outputs=FORMS[n][0])
            for i, n in enumerate(names)
        ]
        together = [o.text for o in llm.generate([PROMPT] * len(names), params)]
        alone = [llm.generate(PROMPT, p)[0].text for p in params]
        copies = llm.generate(PROMPT, SamplingParams(n=3, seed=1, max_tokens=60, structured_outputs=FORMS["regex"][0]))[
            0
        ]
    assert together == alone
    assert all(FORMS["regex"][1](c.text) for c in copies.completions)


def test_allowed_is_what_could_still_become_a_match(grammars) -> None:
    """Against enumeration: every text of the form, cut at every place."""
    words = Tokenizer(tiny.tokenizer())
    texts = ["the river", "the rival", "the", "shore"]
    form = grammars.form(StructuredOutputs(choice=tuple(texts)))
    start = words.encode("the ri", special=False)
    for split in range(len(start) + 1):
        mask = form.allowed(start[:split])
        before = words.decode(start[:split])
        for token in range(len(tiny.tokenizer())):
            piece = words.decode([*start[:split], token], skip_special=False)[len(before) :]
            ends = before in texts if token == 0 else any(t.startswith(before + piece) for t in texts)
            assert mask[token] == bool(ends and piece), (before, piece)


def test_a_path_is_tried_and_forgotten(grammars) -> None:
    words = Tokenizer(tiny.tokenizer())
    form = grammars.form(StructuredOutputs(regex="ab[0-9]c"))
    a, b, seven, c = (words.encode(x, special=False)[0] for x in "ab7c")
    before = form.allowed([a])
    assert form.allowed([a], [b, seven])[c] and not form.allowed([a], [b])[c]
    assert form.allowed([a], [c]) is None, "nothing may stand behind what may not stand there"
    assert (form.allowed([a]) == before).all()
    draft = Tree([b, c, seven, b, c], [-1, -1, 0, 0, 2])
    kept = form.prune([a], draft)
    assert kept.tokens == [b, seven, c] and kept.parents == [-1, 0, 1]
    drawn = Tree([c], [-1], logq_rows=[0])
    assert form.prune([a], drawn) is drawn


def test_the_form_has_the_last_word(model) -> None:
    """min_tokens forbids the end, bad words and a bias forbid what alone is allowed."""
    with LLM(model, speculative=None) as llm:
        assert answer(llm, {"choice": ["the"]}, min_tokens=20, max_tokens=30) == ("the", "stop")
        assert answer(llm, {"choice": ["the river"]}, bad_words=["the"], logit_bias={5: 50.0}) == ("the river", "stop")


@pytest.mark.parametrize(
    "form, words",
    [
        ({"regex": "[a"}, "regex cannot be used"),
        ({"json": '{"type": 5}'}, "json cannot be used"),
        ({"json": "{"}, "json cannot be used"),
        ({"grammar": "start: nothing_of_that_name"}, "grammar cannot be used"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice were given"),
        ({}, "none was given"),
        ({"rejex": "a"}, "Did you mean 'regex'"),
        ({"choice": []}, "non-empty texts"),
        ({"choice": "yes"}, "non-empty texts"),
        ({"json_object": {}}, "should be true"),
        ({"regex": 5}, "should be a text"),
        ("regex", "expected an object"),
    ],
)
def test_a_wrong_form_is_one_sentence(model, form, words: str) -> None:
    with LLM(model, speculative=None) as llm:
        with pytest.raises(BadInput, match=re.escape(words)) as error:
            answer(llm, form)
        assert "\n" not in str(error.value)
        assert llm.generate(PROMPT, SamplingParams(max_tokens=2))[0].text is not None


def test_without_the_library_the_extra_is_named(model, monkeypatch) -> None:
    found = builtins.__import__

    def missing(name: str, *rest, **more):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return found(name, *rest, **more)

    with LLM(model, speculative=None) as llm:
        monkeypatch.setattr(builtins, "__import__", missing)
        with pytest.raises(BadInput, match=r"headstart\[grammar\]"):
            answer(llm, {"regex": "a"})
