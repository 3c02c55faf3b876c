"""`headstart bench`: laps and their books with a planted engine whose numbers are known, and the whole verb on a tiny model."""

from __future__ import annotations

import asyncio
import io
import json
import re
import selectors
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headstart import progress
from headstart.bench import keep, meters, methods, run
from headstart.bench.methods import Method
from headstart.bench.own import OwnEngine
from headstart.bench.provenance import provenance
from headstart.bench.records import BASELINE, Counts, Point, Result
from headstart.bench.run import Answer, Ask, Plan
from headstart.bench.summary import by_category, summarise
from headstart.bench.workloads import Prompt, Workload
from headstart.cli import app
from headstart.errors import BadInput, RequestFailed
from tests import tiny

GOLDEN = 0.6180339887498949


# ------------------------------------------------------------------ a planted engine, in a time of its own
class Jump(selectors.SelectSelector):
    """Nothing is waited for: what was to be waited for is over at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        Jump.now += max(0.0, timeout or 0.0)
        return super().select(0)


class Timeless(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(Jump())

    def time(self) -> float:
        return Jump.now


@pytest.fixture
def timeless(monkeypatch) -> None:
    def complete(work: Any) -> Any:
        with asyncio.Runner(loop_factory=Timeless) as runner:
            return runner.run(work)

    monkeypatch.setattr(run, "complete", complete)
    monkeypatch.setattr(run, "clock", lambda: Jump.now)


@dataclass
class Planted:
    """Tokens that take a known time; drafts of which each token is accepted with a known chance."""

    step: float  # seconds of a forward
    depth: int = 0
    chance: float = 0.0
    draft: float = 0.0  # seconds of a drafted token
    prefill: float = 0.5
    wrong: str | None = None  # the prompt that it answers differently,
    fails: str | None = None  # and the one at which it breaks
    about: Mapping[str, Any] = field(default_factory=lambda: {"memory": 1000})
    asked: list[tuple[str, Ask]] = field(default_factory=list)
    forgot: int = 0
    luck: float = 0.0

    def forget(self) -> None:
        self.forgot += 1

    def counts(self) -> Counts | None:
        return None

    async def answer(self, prompt: Prompt, ask: Ask) -> Answer:
        self.asked.append((prompt.id, ask))
        await asyncio.sleep(self.prefill)
        if prompt.id == self.fails:
            raise RequestFailed("planted")
        counts, tokens = Counts(1, 0, 0, 0, [0] * self.depth, 0.0, 0.0), 1
        while tokens < ask.max_tokens:
            self.luck = (self.luck + GOLDEN) % 1  # evenly spread, so that few steps tell the chance
            right = sum(self.luck < self.chance ** (k + 1) for k in range(self.depth))
            self._count(counts, right)
            await asyncio.sleep(self.step + self.depth * self.draft)
            tokens += right + 1
        ids = [ask.seed + i for i in range(tokens)]
        if prompt.id == self.wrong:
            ids[3] += 1
        seconds = self.prefill + self._seconds(counts)
        return Answer("x" * tokens, 7, tokens, seconds, self.prefill, 1, ids, counts)

    def _count(self, counts: Counts, right: int) -> None:
        assert counts.steps is not None and counts.by_position is not None
        assert counts.draft_seconds is not None and counts.target_seconds is not None
        counts.steps += 1
        counts.target_seconds += self.step
        if self.depth:
            counts.drafts, counts.drafted = (counts.drafts or 0) + 1, (counts.drafted or 0) + self.depth
            counts.accepted, counts.draft_seconds = (
                (counts.accepted or 0) + right,
                counts.draft_seconds + self.depth * self.draft,
            )
            for i in range(right):
                counts.by_position[i] += 1

    @staticmethod
    def _seconds(counts: Counts) -> float:
        return (counts.draft_seconds or 0.0) + (counts.target_seconds or 0.0)


class PlantedEngine:
    name = "planted"

    def __init__(self, **sessions: Planted) -> None:
        self.sessions = sessions

    @contextmanager
    def open(self, methods: Sequence[Method], plan: Plan) -> Iterator[Mapping[str, Planted]]:
        yield {method.name: self.sessions[method.name] for method in methods}

    def margin(self, prompt: Prompt, before: Sequence[int], a: int, b: int) -> tuple[float, bool] | None:
        assert b == a + 1 and len(before) == 3
        return 0.001, True

    def roofline(self, result: Result) -> None:
        return None


def workload(count: int = 40) -> Workload:
    kinds = ("chat", "code")
    return Workload("planted", tuple(Prompt(f"p{i}", kinds[i % 2], "the quick brown fox") for i in range(count)))


def measured(engine: PlantedEngine, plan: Plan) -> Result:
    result = Result({}, {}, {})
    run.run(engine, [Method(name) for name in engine.sessions], plan, result, lambda r: None)
    return result


def test_a_planted_engine_comes_out_as_it_was_planted(timeless) -> None:
    engine = PlantedEngine(none=Planted(0.02), fast=Planted(0.02, 4, 0.7, 0.002))
    plan = Plan(workload(), (Point(1, 0.0), Point(8, 0.0)), rounds=2, max_tokens=200)
    result = measured(engine, plan)
    found = {(s.method, s.point.concurrency): s for s in summarise(result)}
    each = sum(0.7**k for k in range(5))  # tokens of a step: the textbook's sum
    for number in (1, 8):
        plain, fast = found["none", number], found["fast", number]
        assert plain.ms_per_token == pytest.approx(20.0, rel=0.01) and plain.first_ms[50] == pytest.approx(
            500, rel=0.01
        )
        assert plain.block_efficiency == pytest.approx(1.0, rel=0.01) and plain.speedup is None
        assert plain.tokens_per_second == pytest.approx(number * 200 / 4.48, rel=0.01)
        assert fast.acceptance_by_position == pytest.approx([0.7**k for k in range(1, 5)], rel=0.01)
        assert fast.block_efficiency == pytest.approx(each, rel=0.01) and fast.draft_length == 4
        truth = (0.5 + 199 * 0.02) / 200 / _seconds_per_token(result, "fast", number)
        assert fast.speedup is not None and fast.speedup.value == pytest.approx(truth, rel=0.01)
        assert fast.speedup.low < fast.speedup.value < fast.speedup.high
        assert fast.mbsu == pytest.approx(fast.block_efficiency / (0.1 * 4 + 1), rel=0.01)
        assert fast.draft_overhead == pytest.approx(0.008 / 0.028, rel=0.01) and fast.memory == 1000
        assert fast.identical is not None and fast.identical < 1, "its answers are longer by a few tokens"
    assert by_category(result, "fast", Point(1, 0.0)).keys() == {"chat", "code"}


def _seconds_per_token(result: Result, method: str, number: int) -> float:
    samples = result.of(method, Point(number, 0.0))
    return sum(s.seconds for s in samples) / sum(s.tokens for s in samples)


def test_laps_take_turns_and_everyone_gets_the_same_questions(timeless) -> None:
    engine = PlantedEngine(none=Planted(0.01), a=Planted(0.01), b=Planted(0.01))
    plan = Plan(workload(3), (Point(2, 0.0), Point(2, 1.0)), rounds=2, max_tokens=4, seed=10)
    result = measured(engine, plan)
    assert [lap.method for lap in result.laps] == ["none", "a", "b"] * 2 + ["none", "b", "a"] * 2
    assert [lap.temperature for lap in result.laps[:6]] == [0.0] * 3 + [1.0] * 3
    asked = [[ask for ask in session.asked if ask[1].max_tokens == 4] for session in engine.sessions.values()]
    assert asked[0] == asked[1] == asked[2] and len(asked[0]) == 12
    assert {ask.seed for _, ask in asked[0]} == {10, 11, 12}, "each prompt has a seed of its own, in every round"
    assert [session.forgot for session in engine.sessions.values()] == [5, 5, 5], (
        "behind the warm-up, and before each lap"
    )


def test_what_differs_and_what_fails_is_said(timeless) -> None:
    engine = PlantedEngine(none=Planted(0.01), odd=Planted(0.01, wrong="p1", fails="p2"))
    result = measured(engine, Plan(workload(5), (Point(2, 0.0), Point(1, 1.0)), rounds=2, max_tokens=8))
    assert [(d.prompt, d.at, d.margin, d.near_tie) for d in result.differences] == [
        ("p1", 3, 0.001, True), ("p1", 3, None, None),
    ], "a drawn token has noise in it: no margin tells"  # fmt: skip
    odd = next(s for s in summarise(result) if s.method == "odd")
    assert odd.failed == 2 and odd.requests == 8 and odd.identical == pytest.approx(0.75)
    assert next(s.error for s in result.samples if s.error) == "planted"


def test_a_run_that_was_stopped_goes_on(timeless, tmp_path) -> None:
    def engine() -> PlantedEngine:
        return PlantedEngine(none=Planted(0.02), fast=Planted(0.01))

    plan, names = Plan(workload(4), (Point(1, 0.0),), rounds=3, max_tokens=8), [Method("none"), Method("fast")]
    whole = Result({}, {}, {})
    run.run(engine(), names, plan, whole, lambda r: None)

    def stop_in_the_third(result: Result) -> None:
        result.save(tmp_path / keep.FILE)
        if len(result.laps) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(engine(), names, plan, keep.begin(tmp_path, {"a": 1}, {}), stop_in_the_third)
    kept = keep.begin(tmp_path, {}, {})
    assert len(kept.laps) == 3
    run.run(engine(), names, plan, kept, lambda r: None)
    assert kept.samples == whole.samples and [lap.method for lap in kept.laps] == [lap.method for lap in whole.laps]
    run.run(PlantedEngine(), names, plan, kept, lambda r: None)  # nothing is left, and nothing is opened


def test_another_setting_is_not_mixed_with_it(tmp_path) -> None:
    Result({}, {"max_tokens": 128}, {}).save(tmp_path / keep.FILE)
    assert keep.begin(tmp_path, {"max_tokens": 128}, {}).setting == {"max_tokens": 128}
    with pytest.raises(BadInput, match="measured with max_tokens=128, not 64: give another --out, or --fresh"):
        keep.begin(tmp_path, {"max_tokens": 64}, {})
    assert keep.begin(tmp_path, {"max_tokens": 64}, {}, fresh=True).setting == {"max_tokens": 64}
    with pytest.raises(BadInput, match="is a file"):
        keep.begin(tmp_path / keep.FILE, {}, {})


# ------------------------------------------------------------------ methods by name
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("ngram", {"method": "ngram"}),
        ("ngram:5", {"method": "ngram", "num_speculative_tokens": 5}),
        ("eagle3:/a/b:3", {"method": "eagle3", "model": "/a/b", "num_speculative_tokens": 3}),
        ("draft_model:ollama:x:7b", {"method": "draft_model", "model": "ollama:x:7b"}),
        ('{"method": "ngram", "prompt_lookup_max": 3}', {"method": "ngram", "prompt_lookup_max": 3}),
    ],
)
def test_methods_are_read(text, config) -> None:
    assert methods.parse([text]) == [Method(BASELINE), Method(text, config)]


def test_several_methods_and_what_they_share() -> None:
    found = methods.parse(["none,ngram", "suffix:2"], {"num_speculative_tokens": 4})
    assert [(m.name, m.tokens) for m in found] == [("none", None), ("ngram", 4), ("suffix:2", 2)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["ngrm"], "'ngrm' cannot be used"),
        (["ngram,ngram"], "stands twice"),
        (["{bad"], "is not JSON"),
        (['{"method": "ngram", "bogus": 1}'], "bogus"),
    ],
)
def test_methods_that_cannot_be_read(given, why) -> None:
    with pytest.raises(BadInput, match=why):
        methods.parse(given)


# ------------------------------------------------------------------ the real engine
def test_the_engine_itself_and_its_books() -> None:
    plan = Plan(workload(4), (Point(1, 0.0), Point(3, 1.0)), rounds=2, max_tokens=12, ignore_eos=True)
    result = Result({}, {}, {})
    asked = methods.parse(["ngram:3,suffix"], {})
    run.run(OwnEngine(tiny.loaded(), {"kv_memory": 1 << 24}), asked, plan, result, lambda r: None)
    assert not result.differences and len(result.laps) == 12
    for s in summarise(result):
        assert s.tokens == 8 * 12 and s.failed == 0 and s.identical in (None, 1.0)
        assert s.memory is not None and s.memory > 0 and s.first_ms[50] > 0
    first = [s for s in result.samples if s.method == "suffix" and s.temperature == 0]
    assert [s.counts.drafted for s in first[:4]] == [s.counts.drafted for s in first[4:]], "a round leaves no memory"


def test_prompts_that_are_too_long_are_said_before_anything_runs() -> None:
    engine = OwnEngine(tiny.loaded())
    with pytest.raises(BadInput, match=r"The longest prompt has \d+ tokens"):
        run.run(
            engine,
            [Method(BASELINE)],
            Plan(workload(1), (Point(1, 0.0),), max_tokens=10_000),
            Result({}, {}, {}),
            print,
        )


# ------------------------------------------------------------------ the verb
@pytest.fixture
def tiny_model(monkeypatch) -> None:
    monkeypatch.setattr("headstart.models.load.load", lambda *args: tiny.loaded())


def bench(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--kv-memory", "16MB", "--quiet", *args])


def test_the_verb_from_prompts_to_report(tiny_model, monkeypatch, tmp_path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("the quick brown fox\na stone bridge over\nnumbers like 1 2\n")
    args = [
        "--dataset",
        f"text:{text}",
        "--max-tokens",
        "8",
        "--rounds",
        "2",
        "--method",
        "ngram",
        "--out",
        str(tmp_path / "o"),
    ]
    done = bench(*args)
    assert done.exit_code == 0, done.output
    assert "ngram" in done.stdout and "100%" in done.stdout and "report.html" in done.stdout
    assert {p.name for p in (tmp_path / "o").iterdir()} == {"result.json", "report.html", "summary.md"}
    again = bench(*args, "--json")
    told = json.loads(again.stdout)
    assert [s["method"] for s in told["summaries"]] == ["none", "ngram"] and told["differences"] == []
    monkeypatch.setattr("headstart.models.load.load", lambda *args: pytest.fail("nothing is left to be measured"))
    assert bench(*args).exit_code == 0
    assert bench(*args, "--max-tokens", "9").exit_code == 2
    same = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "o"), str(tmp_path / "o" / "result.json")])
    assert same.exit_code == 0 and "ngram" in same.stdout


def test_the_verb_tells_what_it_does_and_counts_what_is_done(tiny_model, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    flags = ["--kv-memory", "16MB", "-n", "1", "--max-tokens", "4", "--rounds", "2", "--method", "ngram"]
    done = CliRunner().invoke(app, ["bench", *flags, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [line for line in done.stderr.splitlines() if line.startswith("Measuring ")] == [
        "Measuring ...",
        "Measuring 0 of 6: warming up none",
        "Measuring 1 of 6: warming up ngram",
        "Measuring 2 of 6: none, 1 at once, temperature 0, round 1 of 2",
        "Measuring 3 of 6: ngram, 1 at once, temperature 0, round 1 of 2",
        "Measuring 4 of 6: none, 1 at once, temperature 0, round 2 of 2",
        "Measuring 5 of 6: ngram, 1 at once, temperature 0, round 2 of 2",
    ]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--concurrency", "0"], "--concurrency 0 is not usable"),
        (["--temperature", "warm"], "--temperature warm is not usable"),
        (["--rounds", "0"], "--rounds 0 is not usable"),
        (["--tensor-parallel-size", "2"], "computes on one device"),
        (["--engine", "vlm"], "--engine vlm is not known"),
        (["--dataset", "gsm9k:x"], "gsm9k"),
        (["--method", "eagle4"], "eagle4"),
    ],
)
def test_mistakes_are_one_sentence(monkeypatch, tmp_path, args, why) -> None:
    monkeypatch.setattr("headstart.models.load.load", lambda *args: pytest.fail("it is said before a model is loaded"))
    done = bench("--out", str(tmp_path), *args)
    assert done.exit_code == 2 and why in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())


def test_vllms_names_work(tiny_model, tmp_path) -> None:
    flags = [
        "--target-model",
        "x",
        "--num-speculative-tokens",
        "2",
        "--use-tree",
        "--max-num-seqs",
        "4",
        "--enforce-eager",
    ]
    flags += ["--tensor-parallel-size", "1", "--draft-tensor-parallel-size", "1", "--method", "suffix"]
    done = bench(*flags, "-n", "1", "--max-tokens", "4", "--rounds", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    kept = Result.load(Path(tmp_path) / keep.FILE)
    assert kept.setting["model"] == "x"
    assert kept.setting["methods"]["suffix"] == {"num_speculative_tokens": 2, "tree": True, "method": "suffix"}


def test_what_is_kept_of_the_command_line_holds_no_key() -> None:
    told = provenance(["headstart", "bench", "--api-key", "secret", "--api-key=secret", "--out", "a=b"])["argv"]
    assert told == ["headstart", "bench", "--api-key", "***", "--api-key=***", "--out", "a=b"]


@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=5))
def test_a_sum_is_known_where_all_of_its_parts_are(values) -> None:
    total = Counts.total([Counts(steps=value) for value in values])
    assert total.steps == (None if None in values else sum(values))


# ------------------------------------------------------------------ progress
def test_without_a_terminal_lines_are_plain_and_few(monkeypatch, capsys) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "clock", lambda: now)
    with progress.bar("Measuring", 9, "laps", done=1) as advance:
        for seconds, done, what in (
            (0, 0, "a"), (4.9, 1, "too soon"), (0.2, 1, "b\nc"), (60, 2, ""), (0, 1, "[d]"), (4, 1, "too soon"), (60, 2, ""),
        ):  # fmt: skip
            now += seconds
            advance(done, what) if what else advance(done)
    told = ["Measuring ...", "Measuring 1 of 9: a", "Measuring 3 of 9: b c", "Measuring 6 of 9: [d]"]
    assert capsys.readouterr().err.splitlines() == told


def test_quiet_is_quiet(capsys) -> None:
    progress.set_quiet(True)
    with progress.bar("Measuring", 2, "laps") as advance:
        advance(1, "a")
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [80, 140])
def test_on_a_terminal_the_bar_says_what_is_done_now(monkeypatch, width) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    with progress.bar("Measuring", 3, "laps") as advance:
        advance(0, "a")
        advance(2, "ngram [x], 4 at once, round 2 of 3, " + "and on " * 20)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").rstrip().splitlines()[-1]
    assert last.startswith("Measuring: ngram [x], 4 at once, round 2 of 3, ") and " 2/3 " in last, last
    assert len(last) <= width


# ------------------------------------------------------------------ engines by name
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--engine", "vlm"], "--engine vlm is not known: choose headstart, transformers, vllm"),
        (["--engine", "headstart:x"], "--engine headstart is here"),
        (["--engine", "vllm:a,vllm:b"], "names vllm twice"),
        (["--engine", "llamacpp", "--gpu-layers", "3"], "--gpu-layers is for our own engine"),
        (["--engine", "vllm", "--engine-args", "'--a"], "cannot be read: No closing quotation"),
        (["--engine", "headstart", "--tensor-parallel-size", "2"], "computes on one device"),
        (["--engine", "vllm:/no/such/place"], "that is no environment of Python"),
        (["--engine", "tabbyapi"], "git clone"),
        (["--engine", "vllm", "--method", "headstart/ngram"], "vLLM is not here"),
    ],
)
def test_engines_that_cannot_be_had_are_said(given, said, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["bench", *given, "--out", str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 2 and said in str(done.stderr or done.output or done.exception), done.output


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_loaded(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("headstart.models.load.load", lambda *args, **more: pytest.fail("loaded"))
    done = CliRunner().invoke(app, ["bench", "--quick", "--out", str(tmp_path / "file" / "out")])
    assert done.exit_code == 2 and "cannot be written: Not a directory. Give another folder." in done.stderr


def test_a_run_that_cannot_begin_anew_leaves_what_is_there(tmp_path) -> None:
    (tmp_path / "result.json").write_text("kept")
    done = CliRunner().invoke(app, ["bench", "--quick", "--fresh", "--model", "nobody", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "no model 'nobody'" in done.stderr
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("result.json", "kept")]


def test_methods_of_several_engines() -> None:
    found = methods.parse(["ngram:2,vllm/dflash:7", "vllm/none,headstart/suffix"], {}, ("headstart", "vllm"))
    assert [(m.name, m.engine) for m in found] == [
        ("none", ""), ("vllm/none", "vllm"), ("ngram:2", ""), ("vllm/dflash:7", "vllm"), ("suffix", ""),
    ]  # fmt: skip
    assert found[3].config == {"method": "dflash", "num_speculative_tokens": 7}, (
        "what only they know is theirs to judge"
    )
    (*_, told) = methods.parse(['vllm/{"method": "ngram", "prompt_lookup_max": 4}'], {}, ("headstart", "vllm"))
    assert told.config == {"method": "ngram", "prompt_lookup_max": 4} and told.engine == "vllm"
    with pytest.raises(BadInput, match="dflash"):
        methods.parse(["dflash:7"], {}, ("headstart", "vllm"))


# ------------------------------------------------------------------ energy
class Driver:
    """NVIDIA's library with two GPUs, which have spent 5 and 7 joules; a third does not count."""

    spent = (5000, 7000)

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
        handle._obj.value = number + 1
        return 0 if number < 3 else 6

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return 0 if name == b"GPU-abc" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, spent: Any) -> int:
        if handle.value > 2:
            return 3
        spent._obj.value = self.spent[handle.value - 1]
        return 0


def test_energy_is_that_of_the_gpus_that_compute(monkeypatch) -> None:
    monkeypatch.setattr(meters, "_nvml", Driver)
    assert (meters.count_gpus(), meters.joules([0, 1]), meters.joules([0, 2]), meters.joules([7])) == (
        3,
        12.0,
        None,
        None,
    )
    device = types.SimpleNamespace(
        is_initialized=lambda: True, get_device_properties=lambda: types.SimpleNamespace(uuid="abc")
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=device))
    assert meters.joules() == 7.0 and meters.since(4.0) == 3.0 and meters.since(8.0) is None


def test_energy_of_a_cpu_is_that_of_its_packages(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(meters, "_nvml", lambda: None)
    monkeypatch.setattr(meters, "RAPL", tmp_path)
    assert meters.joules() is None and meters.since(None) is None and meters.count_gpus() == 0
    for number, microjoules in enumerate((2_000_000, 500_000)):
        (tmp_path / f"intel-rapl:{number}").mkdir()
        (tmp_path / f"intel-rapl:{number}" / "energy_uj").write_text(f"{microjoules}\n")
    assert meters.joules() == 2.5 and meters.since(1.0) == 1.5
