"""Rehearsals: what is tried out before anybody asks, where texts are short, and who drafts meanwhile."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headstart import rehearse
from headstart.errors import BadInput
from headstart.policy import Load
from headstart.policy.periods import Mode
from headstart.tryouts import QUESTIONS, questions
from tests.made_up import CHAIN, MODES, NGRAM, TREE, policy, request


def stage(max_len: int, seqs: int = 8) -> Any:
    config = SimpleNamespace(max_num_seqs=seqs, max_batch_tokens=512, page_size=16)
    return SimpleNamespace(config=config, max_len=max_len, pool=SimpleNamespace(num_slots=seqs * (max_len + 16)))


@pytest.mark.parametrize(("max_len", "texts"), [(4096, 1), (600, 3), (264, 5)])
def test_modes_that_one_text_has_no_room_for_are_tried_in_several(monkeypatch, max_len, texts) -> None:
    modes, played = [Mode("eagle3", n, n) for n in range(1, 6)], []

    @contextmanager
    def running(engine, requests):
        played.append([])
        yield []

    monkeypatch.setattr(rehearse, "running", running)
    monkeypatch.setattr(rehearse, "_made_up", lambda *args: ())
    monkeypatch.setattr(rehearse, "_seconds", lambda engine: 0.5)
    own = SimpleNamespace(order=lambda ordered: played[-1].extend(ordered), ordered=())
    assert rehearse.companies(stage(max_len), {"eagle3": modes}) == [1, 2, 4, 8]
    found = rehearse._play(stage(max_len), own, [], 2, "eagle3", modes)
    assert found == dict.fromkeys(modes, 0.5) and [*itertools.chain(*played)] == modes and len(played) == texts


def test_texts_without_any_room_are_no_rehearsal() -> None:
    assert rehearse.companies(stage(263), {"eagle3": [Mode("eagle3", 1, 1)]}) == []


def test_each_request_drafts_the_first_way_of_a_rehearsal_that_it_may() -> None:
    p = policy()
    p.choices = p.fixed.choices = lambda r: [("eagle3",), ("ngram", "eagle3"), ("ngram",), ()][r.seed]
    p.rehearses, requests = True, [request("code", i, 64) for i in range(4)]
    for ordered, names in (([NGRAM, TREE], ["eagle3", "ngram", "ngram"]), ([TREE], ["eagle3", "eagle3"]), ([], [])):
        p.order(ordered)
        wishes = p.ask(requests, [{}] * 4, Load(4, 0, 0, 100.0, 64))
        assert [name for own in wishes for name in own] == names


def test_heads_are_mixed_with_drafters_on_the_host_where_there_are_both_and_room() -> None:
    def drafter(ahead: bool, layers: tuple[int, ...] = ()) -> Any:
        return SimpleNamespace(ahead=ahead, needs=SimpleNamespace(hidden_layers=layers))

    suffix, modes, sizes = Mode("suffix", 7, 7), {"ngram": MODES[:2], "eagle3": MODES[2:]}, [1, 2, 4, 8]
    drafters = {"ngram": drafter(True), "eagle3": drafter(True, (1, 2)), "suffix": drafter(False)}
    own = stage(4096)
    own.drafting = SimpleNamespace(drafters=drafters)
    assert rehearse._mixtures(own, modes, sizes) == []
    assert rehearse._mixtures(own, {"ngram": MODES[:2], "suffix": [suffix]}, sizes) == []
    both = modes | {"suffix": [suffix]}
    assert rehearse._mixtures(own, both, sizes) == [(n, m, suffix) for n in (2, 4) for m in (CHAIN, TREE)]
    own.config.max_batch_tokens = 40  # there is room for 2 · 16 rows, and for 4 · 8
    assert [(n, m) for n, m, _ in rehearse._mixtures(own, both, sizes)] == [(2, CHAIN), (2, TREE), (4, CHAIN)]


def test_questions_are_asked_plainly_where_a_chat_template_refuses_them() -> None:
    class Refuses:
        def has_chat_template(self) -> bool:
            return True

        def chat(self, messages: object) -> list[int]:
            raise BadInput("This template wants a system message.")

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    assert len(questions(Refuses(), 1000, 256)) == len(QUESTIONS)
    assert questions(Refuses(), 1000, 100) == [] == questions(None, 1000, 256)
