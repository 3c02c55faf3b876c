"""Workloads: what comes along is what it says, data sets are read as they are published, a bad file ends in one sentence."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headstart.bench import datasets
from headstart.bench.workloads import KINDS, MOST_WORDS, RANDOM_PROMPTS, load
from headstart.errors import BadInput

CATEGORIES = {"chat", "code", "maths", "summarising", "translation", "extraction", "editing"}
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def write(folder: Path, name: str, data) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def asked(workload):
    """(id, category, what is asked) of each prompt."""
    return [
        (p.id, p.category, p.content if isinstance(p.content, str) else p.content[0]["content"])
        for p in workload.prompts
    ]


# ------------------------------------------------------------------ the prompts that come along
def test_the_built_in_prompts_are_ten_of_each_of_seven_categories():
    prompts = load().prompts
    assert Counter(p.category for p in prompts) == dict.fromkeys(CATEGORIES, 10)
    texts = [text for _, _, text in asked(load())]
    assert len(set(texts)) == len({" ".join(t.lower().split()) for t in texts}) == len({p.id for p in prompts}) == 70
    assert all(len(text.split()) <= 400 and text == text.strip() for text in texts)
    assert all(p.content == ({"role": "user", "content": text},) for p, text in zip(prompts, texts, strict=True))


@pytest.mark.parametrize("category", ["summarising", "extraction", "editing"])
def test_prompts_about_a_text_carry_one(category):
    for _, of, text in asked(load()):
        if of == category:
            assert 80 <= len(text.split("\n\n", 1)[1].split()) <= 250


def test_a_few_prompts_are_spread_over_the_categories():
    assert load() == load("built-in", 70) == load("built-in", 1000) == load(seed=5)
    assert {p.category for p in load(count=7).prompts} == CATEGORIES
    assert load(count=9).prompts == load().prompts[:9]
    assert max(Counter(p.category for p in load(count=30).prompts).values()) == 5


# ------------------------------------------------------------------ data sets
QUESTION = {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now shorter."]}
TALK = [{"from": "gpt", "value": "Hello."}, {"from": "human", "value": "Why?"}, {"from": "human", "value": "No."}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
GOOD = [  # kind, file, content, (id, category, what is asked); the kind is recognised where the file is
    ("gsm8k", "a.jsonl", lines({"question": "1 + 1?", "answer": "2"}), ("1", "maths", "1 + 1?")),
    ("gsm8k", "a.json", json.dumps([{"question": "1 + 1?", "answer": "2"}]), ("1", "maths", "1 + 1?")),
    ("spec_bench", "question.jsonl", lines(QUESTION | {"category": "rag"}), ("81", "rag", "Write a poem.")),
    ("mt_bench", "question.jsonl", lines(QUESTION), ("81", "writing", "Write a poem.")),
    ("speed_bench", "a.jsonl", lines(QUESTION | {"sub_category": "poem"}), ("81", "writing", "Write a poem.")),
    ("speed_bench", "a.jsonl", lines({"question_id": "x", "category": "qa", "messages": MESSAGES}), ("x", "qa", "Why?")),
    ("humaneval", "a.jsonl", lines({"task_id": "H/0", "prompt": "def f():\n"}), ("H/0", "code", "def f():\n")),
    ("humaneval", "a.jsonl.gz", gzip.compress(lines({"task_id": "H/0", "prompt": "def f():\n"}).encode()),
     ("H/0", "code", "def f():\n")),
    ("sharegpt", "a.json", json.dumps([{"id": "x_0", "conversations": TALK}]), ("x_0", "chat", "Why?")),
    ("sharegpt", "a.jsonl", "\ufeff" + lines({"messages": MESSAGES}), ("1", "chat", "Why?")),
    ("cnn_dailymail", "a.csv", 'id,article,highlights\r\n7,"Some ""news"",\r\ntoday.",short\r\n',
     ("7", "summarising", 'Summarise this article in three sentences.\n\nSome "news",\r\ntoday.')),
    ("cnn_dailymail", "a.jsonl", lines({"id": "7", "article": "News."}),
     ("7", "summarising", "Summarise this article in three sentences.\n\nNews.")),
    ("prompts", "a.jsonl", lines({"prompt": "Hi", "category": "code", "id": "x"}), ("x", "code", "Hi")),
    ("prompts", "a.jsonl", lines({"instruction": "Add", "input": "1, 2"}), ("1", "chat", "Add\n\n1, 2")),
    ("prompts", "a.jsonl", lines({"instruction": "Add", "instances": [{"input": ""}]}), ("1", "chat", "Add")),
    ("text", "a.txt", "\r\n  one line \r\n\r\n", ("2", "chat", "one line")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "data", "expected"), GOOD, ids=lambda v: v if isinstance(v, str) and len(v) < 15 else ""
)
def test_a_data_set_is_read_and_recognised(tmp_path, kind, name, data, expected):
    path = write(tmp_path, name, data)
    found = load(f"{kind}:{path}")
    assert asked(found) == [expected]
    assert found.name == (name if kind in ("prompts", "text") else kind)
    assert load(str(path)) == found
    assert isinstance(found.prompts[0].content, str) == (kind == "humaneval")


@pytest.mark.parametrize(("kind", "place"), [(k, place) for k, kind in KINDS.items() for place in kind.places])
def test_a_folder_has_the_file_where_its_project_puts_it(tmp_path, arrow, kind, place):
    row = {"speed_bench": QUESTION | {"sub_category": "poem"}, "spec_bench": QUESTION, "mt_bench": QUESTION}.get(
        kind, {"task_id": "1", "prompt": "a", "question": "a", "answer": "b", "article": "c", "conversations": TALK}
    )
    data = b"PAR1" + json.dumps([row]).encode() if place.endswith("parquet") else lines(row)
    write(tmp_path, place, gzip.compress(data.encode()) if place.endswith("gz") else data)
    assert load(f"{kind}:{tmp_path}").name == kind
    assert len(load(str(tmp_path)).prompts) == 1


def test_long_articles_are_cut(tmp_path):
    path = write(tmp_path, "a.jsonl", lines({"article": "word\n " * (MOST_WORDS + 5)}))
    [(_, _, text)] = asked(load(str(path)))
    article = text.split("\n\n", 1)[1]
    assert len(article.split()) == MOST_WORDS and article.endswith("\n word")


def test_conversations_without_a_user_are_left_out(tmp_path):
    rows = [{"conversations": []}, {"conversations": TALK[:1]}, {"conversations": [{"from": "human", "value": ""}]}]
    path = write(tmp_path, "a.jsonl", lines(*rows, {"conversations": TALK}))
    assert asked(load(str(path))) == [("4", "chat", "Why?")]
    with pytest.raises(BadInput, match="no turn of a user"):
        load(str(write(tmp_path, "b.jsonl", lines(*rows))))


def test_a_sample_depends_on_the_seed_alone_and_is_part_of_a_larger_one(tmp_path):
    rows = [QUESTION | {"question_id": i, "category": c, "turns": [f"{i}"]} for i in range(60) for c in ["qa", "rag"]]
    path = f"spec_bench:{write(tmp_path, 'question.jsonl', lines(*rows))}"
    whole = load(path, seed=1)
    assert len({p.id for p in whole.prompts}) == 120  # each id was there twice
    assert whole == load(path, seed=1) and whole != load(path, seed=2)
    assert load(path, 10, seed=1).prompts == whole.prompts[:10]
    assert Counter(p.category for p in load(path, 11, seed=2).prompts).most_common()[1][1] == 5
    assert sorted(asked(whole)) == sorted(asked(load(path)))


# ------------------------------------------------------------------ parquet
@pytest.fixture
def arrow(monkeypatch):
    """As much of pyarrow as is used. Its parquet files hold JSON."""

    class File:
        def __init__(self, data):
            self.data = data

        def read(self, use_threads):
            return self

        def to_pylist(self):
            return json.loads(self.data[4:])

    package, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    package.ArrowException, package.BufferReader, package.parquet = RuntimeError, bytes, parquet
    parquet.ParquetFile = File
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)


def test_parquet_is_told_by_its_first_bytes(tmp_path, arrow):
    path = write(tmp_path, "data", b'PAR1[{"question": "1 + 1?", "answer": "2"}]')
    assert asked(load(str(path))) == [("1", "maths", "1 + 1?")]
    with pytest.raises(BadInput, match="row 1: there is no field 'article', only 'question', 'answer'"):
        load(f"cnn_dailymail:{path}")
    with pytest.raises(BadInput, match="cannot be read as a parquet file"):
        load(f"gsm8k:{write(tmp_path, 'broken.parquet', b'PAR1{')}")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"pip install 'headstart\[bench\]'"):
        load(f"gsm8k:{write(tmp_path, 'a.parquet', b'PAR1')}")


def test_real_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "test.parquet"
    parquet.write_table(arrow.Table.from_pylist([QUESTION | {"sub_category": "poem"}]), path)
    found = load(str(path))
    assert (found.name, asked(found)) == ("speed_bench", [("81", "writing", "Write a poem.")])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match="cannot be read as a parquet file"):
        load(str(path))


# ------------------------------------------------------------------ random
def test_random_tokens_are_seeded_and_hold_nothing_to_find():
    found = load("random:ignored", 3, seed=4, vocab_size=1000, length=200)
    assert (
        found
        == load("random", 3, seed=4, vocab_size=1000, length=200)
        != load("random", 3, seed=5, vocab_size=1000, length=200)
    )
    assert found.prompts == load("random", seed=4, vocab_size=1000, length=200).prompts[:3]
    for prompt in found.prompts:
        assert len(set(prompt.content)) == 200 and all(0 <= token < 1000 for token in prompt.content)
    assert len(load("random", vocab_size=9).prompts) == RANDOM_PROMPTS
    assert {len(p.content) for p in load("random", vocab_size=9).prompts} == {512}


@pytest.mark.parametrize(("options", "reason"), [({}, "vocabulary"), ({"vocab_size": 9, "length": 0}, "one token")])
def test_random_tokens_need_a_vocabulary_and_a_length(options, reason):
    with pytest.raises(BadInput, match=reason):
        load("random", **options)


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("gsm9k", "no workload 'gsm9k'. Did you mean 'gsm8k'"),
        ("gsm9k:file.jsonl", "Did you mean 'gsm8k'"),
        ("", "Known: built-in"),
        ("no/such.jsonl", "There is no file no/such.jsonl"),
        ("~nobody-here/x", "There is no file"),
        ("gsm8k:no/such.jsonl", "There is no file no/such.jsonl"),
        ("gsm8k:a\0b", "There is no file"),
        ("gsm8k:" + "a" * 5000, "There is no file"),
        ("gsm8k", "say gsm8k:PATH"),
        ("built-in:mine.jsonl", "say prompts:PATH"),
    ],
)
def test_what_is_not_there_is_said(spec, reason):
    with pytest.raises(BadInput, match=reason.replace(".", r"\.")):
        load(spec)


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_is_one_at_least(count):
    with pytest.raises(BadInput, match=f"the count is {count}"):
        load(count=count)


BAD = [
    ("gsm8k", "a.jsonl", lines({"question": "a"}) + "\n{oops}\n", r"a.jsonl, line 3: broken JSON"),
    ("gsm8k", "a.jsonl", "[1, 2]", r"item 1: this should be a JSON object, not int"),
    ("gsm8k", "a.json", '[{"question": "a"},\n{]', r"a.json, line 2: broken JSON"),
    ("gsm8k", "a.jsonl", "7", r"line 1: this should be a JSON object, not int"),
    (
        "gsm8k",
        "a.jsonl",
        lines({"question": "a"}, {"answer": "b"}),
        r"line 2: there is no field 'question', only 'answer'",
    ),
    ("gsm8k", "a.jsonl", "{}", r"there is no field 'question', only an empty object"),
    ("gsm8k", "a.jsonl", lines({"question": 7}), r"line 1: the field 'question' should be a text, not int"),
    ("gsm8k", "a.jsonl", lines({"question": " "}), r"line 1: the field 'question' is empty"),
    ("gsm8k", "a.jsonl", lines({"question": "\ud800"}), r"line 1: the field 'question' holds half of a character"),
    ("gsm8k", "a.jsonl", lines({"question": "a", "id": [1]}), r"the field 'id' should be a text, not list"),
    ("gsm8k", "a.jsonl", "", r"a.jsonl is empty"),
    ("gsm8k", "a.jsonl", " \n\n", r"a.jsonl is empty"),
    ("gsm8k", "a.json", "[]", r"a.json is empty"),
    ("gsm8k", "a.jsonl", b'{"question": "a"}\n\xff', r"line 2: this is not text in UTF-8"),
    ("gsm8k", "a.jsonl", b"\n\0", r"line 2: this is not text"),
    ("gsm8k", "a.jsonl", "[" * 100_000, r"this JSON cannot be read"),
    ("gsm8k", "a.jsonl", '{"question": ' + "1" * 5000 + "}", r"this JSON cannot be read"),
    ("spec_bench", "a.jsonl", lines(QUESTION | {"turns": []}), r"the field 'turns' is empty"),
    ("spec_bench", "a.jsonl", lines(QUESTION | {"turns": "a"}), r"the field 'turns' should be a list, not str"),
    ("spec_bench", "a.jsonl", lines(QUESTION | {"turns": [1]}), r"the first turn should be a text, not int"),
    ("mt_bench", "a.jsonl", lines({"turns": ["a"]}), r"there is no field 'category'"),
    ("speed_bench", "a.jsonl", lines(QUESTION | {"turns": [WITHHELD]}), r"line 1: its text is withheld"),
    ("speed_bench", "a.jsonl", lines({"category": "a", "messages": MESSAGES[:1]}), r"there is no turn of a user"),
    ("speed_bench", "a.jsonl", lines({"category": "a"}), r"there is no field 'prompt'"),
    ("humaneval", "a.jsonl", lines({"task_id": "a"}), r"there is no field 'prompt'"),
    ("humaneval", "a.jsonl.gz", gzip.compress(b"{}" * 999)[:-9], r"a.jsonl.gz cannot be read"),
    ("sharegpt", "a.jsonl", lines({"conversations": ["a"]}), r"a turn in 'conversations' should be an object, not str"),
    ("sharegpt", "a.jsonl", lines({"conversations": [{"from": "human", "value": 7}]}), r"should be a text, not int"),
    ("sharegpt", "a.jsonl", lines({"id": "a"}), r"there is no field 'messages'"),
    ("cnn_dailymail", "a.csv", 'article\n"broken', r"line 2: this is not CSV"),
    ("cnn_dailymail", "a.csv", "id,article\n1\n", r"line 2: the field 'article' should be a text, not NoneType"),
    ("cnn_dailymail", "a.csv", "article\n", r"a.csv is empty"),
    ("prompts", "a.jsonl", lines({"text": "a"}), r"there is no field 'instruction', only 'text'"),
    ("text", "a.txt", "\n \n", r"a.txt is empty"),
    ("", "a.jsonl", lines({"x": 1}), r"a.jsonl is of no known kind, its fields being 'x': say NAME:PATH"),
]


@pytest.mark.parametrize(("kind", "name", "data", "reason"), BAD, ids=[reason for *_, reason in BAD])
def test_a_broken_file_is_named_with_the_line_and_what_is_wrong(tmp_path, kind, name, data, reason):
    path = write(tmp_path, name, data)
    with pytest.raises(BadInput, match=reason) as error:
        load(f"{kind}:{path}" if kind else str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_without_the_file_says_which_is_expected(tmp_path):
    with pytest.raises(BadInput, match=r"expected question\.jsonl in it"):
        load(f"mt_bench:{tmp_path}")
    with pytest.raises(BadInput, match="without a file that is known here"):
        load(str(tmp_path))


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "MOST_BYTES", 1 << 20)
    with pytest.raises(BadInput, match="too large"):
        load(f"gsm8k:{write(tmp_path, 'a.jsonl.gz', gzip.compress(bytes(1 << 22)))}")


FIELDS = (
    "question answer turns category sub_category question_id messages role content conversations from value task_id prompt "
    "article id instruction input instances"
)
FIELD = st.sampled_from(FIELDS.split())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | FIELD, inner, max_size=4),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(FIELD, JSON, max_size=6), max_size=3)
DATA = st.binary() | ROWS.map(lambda rows: lines(*rows).encode()) | st.binary().map(gzip.compress)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("", "x.jsonl", b"PAR1")
@example("cnn_dailymail", "x.csv", b"a\r\rb\0\n")
@given(
    st.sampled_from(["", *KINDS]),
    st.sampled_from(["x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet"]),
    DATA,
)
def test_any_file_is_a_workload_or_bad_input(tmp_path, kind, name, data):
    path = write(tmp_path, name, data)
    try:
        found = load(f"{kind}:{path}" if kind else str(path), 3)
    except BadInput as error:
        assert str(error).endswith(".") and "\n" not in str(error)
    else:
        assert 1 <= len({p.id for p in found.prompts}) == len(found.prompts) <= 3
