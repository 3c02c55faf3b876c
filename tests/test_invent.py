"""Prompts that the target writes itself."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from headstart.cli import app
from headstart.errors import BadInput
from headstart.train.data import user_prompt
from headstart.train.invent import EACH, EXAMPLES, KINDS, invent, listed, question
from tests import tiny

SEEDS = [user_prompt(f"Write a function number {i} in C.") for i in range(8)]


def said(text, finish_reason="stop"):
    return SimpleNamespace(text=text, finish_reason=finish_reason)


class Writer:
    """Answers each question with a list that depends on the question and the seed alone."""

    def __init__(self, answer=None):
        self.answer, self.questions = answer or self.new, []

    @staticmethod
    def new(seed):
        lines = [f"{i + 1}. Write program {i} of list {seed} in Go." for i in range(EACH)]
        return said("Sure:\n" + "\n".join([*lines, lines[0], f"{EACH + 1}. {SEEDS[0].messages[-1][1]}"]))

    def chat(self, messages, params):
        self.questions += [m[0]["content"] for m in messages]
        assert all(p.temperature == 1.0 for p in params)
        return [self.answer(p.seed) for p in params]


def test_lists_are_read_whatever_their_style():
    text = "Here:\n1. **Write a parser in Rust.**\n 2) Sort a list of names.\n\n3: too short\n- no number, this\n10. Sum the"
    assert listed(said(text)) == ["Write a parser in Rust.", "Sort a list of names."]
    assert listed(said("1. Write a parser in Rust.\n2. Sort the list of na", "length")) == ["Write a parser in Rust."]


def test_examples_and_kinds_change_from_ask_to_ask():
    shown = [p.messages[-1][1] for p in SEEDS]
    asked = [question(shown, i, 0) for i in range(6)]
    assert len(set(asked)) == 6 and asked == [question(shown, i, 0) for i in range(6)]
    for i, text in enumerate(asked):
        assert len(re.findall("^- ", text, re.M)) == EXAMPLES and KINDS[i % len(KINDS)] in text


def test_new_prompts_come_once_each_and_no_more_than_asked_for(tmp_path):
    found = invent(Writer(), SEEDS, 35, tmp_path / "p.jsonl", batch=2)
    assert len(found) == len({p.id for p in found}) == 35
    assert not {p.id for p in found} & {p.id for p in SEEDS}
    again = Writer()
    assert invent(again, SEEDS, 35, tmp_path / "p.jsonl") == found and not again.questions


@pytest.mark.parametrize("torn", [0, 10])
def test_a_kill_loses_nothing_but_the_round(tmp_path, torn):
    whole = invent(Writer(), SEEDS, 40, tmp_path / "whole.jsonl", batch=1)
    path = tmp_path / "p.jsonl"
    invent(Writer(), SEEDS, 20, path, batch=1)
    path.write_text(path.read_text()[: -torn or None])
    found = invent(Writer(), SEEDS, 40, path, batch=1)
    assert len(found) == 40 and {p.id for p in found[:19]} == {p.id for p in whole[:19]}
    if not torn:
        assert found == whole and path.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_a_target_that_repeats_itself_ends_it(tmp_path, capsys):
    same = Writer(lambda seed: said("1. Write the same program again."))
    assert len(invent(same, SEEDS, 50, tmp_path / "p.jsonl", batch=2)) == 1
    assert "no more new prompts to offer: there are 1 of 50" in capsys.readouterr().err


def test_bad_input_is_said_in_one_sentence(tmp_path):
    long = [user_prompt("a line\nand another"), *SEEDS[:4], user_prompt("x" * 400)]
    with pytest.raises(BadInput, match="takes 5 of one line and at most 300 characters, and there are 4"):
        invent(Writer(), long, 5, tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(BadInput, match="is not a file of prompts that a target wrote"):
        invent(Writer(), SEEDS, 5, tmp_path / "p.jsonl")


def test_a_run_asks_for_them_first_and_answers_them_too(tmp_path, monkeypatch):
    folder, seeds = tiny.folder(tmp_path / "model"), tmp_path / "seeds.txt"
    seeds.write_text("\n".join(p.messages[-1][1] for p in SEEDS))
    monkeypatch.setattr("headstart.train.invent._offers", lambda llm, shown, asks, seed: [
        (ask, f"write the story of the number {ask} and {i}") for ask in asks for i in range(EACH)
    ])  # fmt: skip
    args = ["train", "eagle3", "-m", str(folder), "-p", str(seeds), "-o", str(tmp_path / "out"), "--more-prompts", "12"]
    args += ["--max-tokens", "8", "--steps", "1", "--length", "64", "--draft-vocab", "200", "--device", "cpu"]
    args += ["--dtype", "float32", "--held-out", "0"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "out/work/prompts.jsonl").read_text().splitlines()) == 12
    answers = [json.loads(line) for line in (tmp_path / "out/work/answers.jsonl").read_text().splitlines()]
    assert len(answers) == 20
    assert "| more_prompts | 12 |" in (tmp_path / "out/README.md").read_text()
    alone = CliRunner().invoke(
        app, ["train", "eagle3", "-m", str(folder), "--answers", "x", "-o", "y", "--more-prompts", "3"]
    )
    assert alone.exit_code == 2 and "give a file of prompts too" in alone.output
