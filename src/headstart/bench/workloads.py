"""What is asked in a benchmark: the prompts that come along, a data set that lies on the disk, a text file, or random tokens.

A data set is named and has a file, `gsm8k:PATH`; a path alone will do where the fields of its first row tell what it is.
Each prompt is one request. Of a conversation only the first turn is asked: there is no answer yet for a second to follow.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headstart.bench.datasets import Row, quoted, read_lines, read_rows
from headstart.errors import BadInput, nearest

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
MOST_WORDS = 1000  # of an article that is to be summarised
RANDOM_PROMPTS = 32  # where no count is given
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # how SPEED-Bench marks texts that it may not pass on


@dataclass(frozen=True)
class Prompt:
    id: str  # unique within its workload, the same in every run
    category: str
    content: str | tuple[Mapping[str, str], ...] | tuple[int, ...]  # a text to go on with, a conversation, or token ids


@dataclass(frozen=True)
class Workload:
    name: str  # as it is said in reports
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Kind:
    """A data set: how a row of it becomes a prompt, and how it is recognised."""

    prompt: Callable[[Row], Prompt | None]  # None: the row has nothing to ask
    marks: tuple[tuple[str, ...], ...] = ()  # a row with all fields of one of these is one of its
    places: tuple[str, ...] = ()  # where its folder has the file
    own: bool = False  # written by whoever measures: the order is theirs, and so is the name


def load(
    spec: str = "built-in", count: int | None = None, seed: int = 0, *, vocab_size: int = 0, length: int = 512
) -> Workload:
    """`spec` is NAME, NAME:PATH or a PATH whose kind is recognised.

    Prompts come in rounds, one of each category in turn, and the first `count` of them are taken: all, where it is None or
    there are fewer. Within a category, own prompts (`built-in`, `prompts`, `text`) keep the order of the file. Those of a data
    set are put in an order that the seed alone decides, so that a longer run asks all that a shorter one did.
    `vocab_size` and `length` are for `random`.
    """
    if count is not None and count < 1:
        raise BadInput(f"A benchmark needs one prompt at least: the count is {count}.")
    name, path = _split(spec)
    if name == "random":
        return Workload(name, tuple(_random(count or RANDOM_PROMPTS, seed, vocab_size, length)))
    name, kind, rows = _built_in(path) if name == "built-in" else _read(name, path)
    prompts = _unique(prompt for row in rows if (prompt := kind.prompt(row)) is not None)
    if not prompts:
        raise BadInput(f"{path} holds no prompts: there is no turn of a user in it.")
    return Workload(name, _spread(prompts if kind.own else _shuffled(prompts, seed))[:count])


# ------------------------------------------------------------------ names and files
def _split(spec: str) -> tuple[str, str]:
    """(name, path), either of them empty where it is not said."""
    name, _, path = spec.partition(":")
    if name in NAMES:
        return name, path
    if os.path.exists(os.path.expanduser(spec)):
        return "", spec
    if len(name) == 1 or any(c in name for c in "./\\~"):  # one letter: a drive
        raise BadInput(f"There is no file {spec}.")
    raise BadInput(f"There is no workload {name!r}.{nearest(name, NAMES)}")


def _built_in(path: str) -> tuple[str, Kind, list[Row]]:
    if path:
        raise BadInput("The workload built-in takes no file: for prompts of your own say prompts:PATH.")
    return "built-in", KINDS["prompts"], read_rows(BUILT_IN)


def _read(name: str, path: str) -> tuple[str, Kind, list[Row]]:
    """What the workload is called, what it is, and its rows."""
    if not path:
        raise BadInput(f"The workload {name} needs its file: say {name}:PATH.")
    file = _find(name, Path(os.path.expanduser(path)))
    if name == "text" or (not name and file.suffix == ".txt"):
        name, rows = "text", read_lines(file)
    else:
        rows = read_rows(file)
        name = name or _recognise(file, rows)
    kind = KINDS[name]
    return file.name if kind.own else name, kind, rows


def _find(name: str, path: Path) -> Path:
    """The file itself: in a folder, it lies where the data set's own project puts it."""
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        raise BadInput(f"There is no file {path}.")
    places = KINDS[name].places if name else [place for kind in KINDS.values() for place in kind.places]
    for place in places:
        if os.path.isfile(path / place):
            return path / place
    expected = f": expected {' or '.join(places)} in it" if name and places else ""
    raise BadInput(f"{path} is a folder without a file that is known here{expected}.")


def _recognise(file: Path, rows: list[Row]) -> str:
    fields = rows[0].fields
    for name, kind in KINDS.items():
        if any(all(mark in fields for mark in marks) for marks in kind.marks):
            return "mt_bench" if name == "spec_bench" and _is_mt_bench(rows) else name
    raise BadInput(
        f"{file} is of no known kind, its fields being {quoted(list(fields))}: "
        f"say NAME:PATH, NAME being one of {', '.join(KINDS)}."
    )


def _is_mt_bench(rows: Iterable[Row]) -> bool:
    """Spec-Bench holds all of MT-Bench, and more."""
    return all(isinstance(c := row.fields.get("category"), str) and c in MT_BENCH for row in rows)


# ------------------------------------------------------------------ rows to prompts
def _user(text: str) -> tuple[Mapping[str, str], ...]:
    return ({"role": "user", "content": text},)


def _own(row: Row) -> Prompt:
    """`prompt`, or an `instruction` with what it is about; `category` and `id` where they are said."""
    text = row.text("prompt") if "prompt" in row.fields else row.text("instruction") + _input(row)
    return Prompt(row.id(), row.text("category") if row.fields.get("category") else "chat", _user(text))


def _input(row: Row) -> str:
    instances = row.fields.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else row.fields
    value = first.get("input") if isinstance(first, Mapping) else None
    return "\n\n" + row.check_text(value, "the field 'input'") if value else ""


def _line(row: Row) -> Prompt:
    return Prompt(row.id(), "chat", _user(row.text("text")))


def _gsm8k(row: Row) -> Prompt:
    return Prompt(row.id(), "maths", _user(row.text("question")))


def _humaneval(row: Row) -> Prompt:
    return Prompt(row.id("task_id"), "code", row.text("prompt"))


def _article(row: Row) -> Prompt:
    words = list(re.finditer(r"\S+", article := row.text("article")))
    if len(words) > MOST_WORDS:
        article = article[: words[MOST_WORDS - 1].end()]
    return Prompt(row.id(), "summarising", _user(f"Summarise this article in three sentences.\n\n{article}"))


def _turns(row: Row) -> Prompt:
    return Prompt(row.id("question_id"), row.text("category"), _user(_first_turn(row)))


def _first_turn(row: Row) -> str:
    turns = row.items("turns")
    if not turns:
        raise row.wrong("the field 'turns' is empty")
    return row.check_text(turns[0], "the first turn")


def _speed_bench(row: Row) -> Prompt:
    """Parquet files have turns, JSON lines made of them have messages. No row is left out: a part would not be SPEED-Bench."""
    if "turns" in row.fields:
        text: str | None = _first_turn(row)
    elif "messages" in row.fields:
        text = _asked(row, "messages")
    else:
        text = row.text("prompt")
    if text is None:
        raise row.wrong("there is no turn of a user")
    if text.startswith(WITHHELD):
        raise row.wrong("its text is withheld: NVIDIA's examples/specdec_bench/prepare_data.py puts it in")
    return Prompt(row.id("question_id"), row.text("category"), _user(text))


def _sharegpt(row: Row) -> Prompt | None:
    """Conversations in which no user says anything are left out: the public file has such."""
    text = _asked(row, "conversations" if "conversations" in row.fields else "messages")
    return None if text is None else Prompt(row.id(), "chat", _user(text))


def _asked(row: Row, name: str) -> str | None:
    """The first turn of a user that says anything."""
    for turn in row.items(name):
        if not isinstance(turn, Mapping):
            raise row.wrong(f"a turn in {name!r} should be an object, not {type(turn).__name__}")
        text = turn.get("value", turn.get("content"))
        if turn.get("from", turn.get("role")) in ("human", "user") and text not in (None, ""):
            return row.check_text(text, "the turn of the user")
    return None


KINDS: Mapping[str, Kind] = {  # the first that a row has the marks of is what it is
    "speed_bench": Kind(
        _speed_bench,
        marks=(("turns", "sub_category"), ("question_id", "messages")),
        places=("test.parquet", "qualitative/test.parquet", "qualitative/test-00000-of-00001.parquet"),
    ),
    "spec_bench": Kind(_turns, marks=(("turns", "category"),), places=("question.jsonl",)),
    "mt_bench": Kind(_turns, places=("question.jsonl",)),
    "humaneval": Kind(
        _humaneval,
        marks=(("task_id", "prompt"),),
        places=("HumanEval.jsonl.gz", "HumanEval.jsonl", "openai_humaneval/test-00000-of-00001.parquet"),
    ),
    "gsm8k": Kind(_gsm8k, marks=(("question", "answer"),), places=("main/test-00000-of-00001.parquet", "test.jsonl")),
    "sharegpt": Kind(
        _sharegpt,
        marks=(("conversations",), ("messages",)),
        places=("ShareGPT_V3_unfiltered_cleaned_split.json",),
    ),
    "cnn_dailymail": Kind(_article, marks=(("article",),), places=("3.0.0/test-00000-of-00001.parquet",)),
    "prompts": Kind(_own, marks=(("prompt",), ("instruction",)), own=True),
    "text": Kind(_line, own=True),  # a prompt on each line, asked as a user's message
}
NAMES = ("built-in", "random", *KINDS)


# ------------------------------------------------------------------ order
def _unique(prompts: Iterable[Prompt]) -> list[Prompt]:
    """An id that is there twice gets its place behind it."""
    found: dict[str, Prompt] = {}
    for place, prompt in enumerate(prompts, 1):
        name = prompt.id
        while name in found:
            name = f"{name}#{place}"
        found[name] = replace(prompt, id=name)
    return list(found.values())


def _shuffled(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """By a hash of seed and id: the same order on every machine and in every version of Python."""
    return sorted(prompts, key=lambda p: hashlib.sha256(f"{seed}:{p.id}".encode()).digest())


def _spread(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """In rounds: the first prompt of each category, then the second of each."""
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, int, Prompt]] = []
    columns: dict[str, int] = {}
    for prompt in prompts:
        column = columns.setdefault(prompt.category, len(columns))
        ranked.append((seen[prompt.category], column, prompt))
        seen[prompt.category] += 1
    return tuple(prompt for _, _, prompt in sorted(ranked, key=lambda r: r[:2]))


# ------------------------------------------------------------------ random
def _random(count: int, seed: int, vocab_size: int, length: int) -> Iterator[Prompt]:
    """Tokens in which there is nothing to find: each is equally likely, and none comes twice while the vocabulary lasts."""
    if vocab_size < 1:
        raise BadInput(f"The workload random needs the size of a vocabulary: it is {vocab_size}.")
    if length < 1:
        raise BadInput(f"A random prompt has one token at least: the length is {length}.")
    for number in range(1, count + 1):
        rng = random.Random(f"{seed}:{number}")
        tokens = (
            rng.sample(range(vocab_size), length) if length <= vocab_size else rng.choices(range(vocab_size), k=length)
        )
        yield Prompt(f"random-{number}", "random", tuple(tokens))
