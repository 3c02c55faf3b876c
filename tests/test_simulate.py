"""Traces and the simulator: files, recording, the clock against computations by hand, and that adaptive does not lose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headstart.cli import app
from headstart.config import SpeculativeConfig
from headstart.core import Draft, Request, SamplingParams, Tree, View
from headstart.drafters import Drafter, register
from headstart.errors import BadInput
from headstart.policy import Load, Wish
from headstart.policy.adaptive import AdaptivePolicy
from headstart.policy.ahead import AheadPolicy
from headstart.policy.costs import Costs, Work
from headstart.policy.fixed import FixedPolicy
from headstart.policy.goodput import GoodputPolicy
from headstart.policy.periods import Mode
from headstart.policy.recording import Recording
from headstart.scheduler import Plan, Planned
from headstart.simulate.answers import FIRST_TOKEN, Answers
from headstart.simulate.entrants import Entrant
from headstart.simulate.machines import PRESETS, Machine, read_machine
from headstart.simulate.many import compare
from headstart.simulate.replay import Outcome, Replay, Setting
from headstart.traffic import Arrival, Seen, Skill, Trace, header, read_trace, synthesise, to_line, write_trace
from tests import harness, tiny

POINTS = {1: 0.010, 2: 0.011, 64: 0.042}
MACHINE = Machine("test", Costs(POINTS), {"eagle3": Work(0.001, 0.0)}, 0.002)


def replay(trace: Trace, policy: str, machine: Machine = MACHINE, **setting: Any) -> tuple[Outcome, Outcome]:
    plain, own = compare(trace, [Entrant.parse(policy)], machine, Setting(**setting))
    return plain, own


def steady(chance: float, output: int = 4000, prompt: int = 1, **more: Any) -> Trace:
    return Trace((Arrival(0.0, prompt, output, {"eagle3": Skill(((0.0, chance),), **more)}),), 5)


# ------------------------------------------------------------------ files
def test_a_trace_comes_back_from_its_file(tmp_path: Path):
    recorded = Arrival(1.5, 2, 3, {}, (7, 8), (9, 9, 10), {"eagle3": (Seen(0, (True, False), (0.5, 0.25)),)})
    trace = Trace((*synthesise(3).requests, recorded), 3, "a title")
    write_trace(tmp_path / "t.jsonl", trace)
    again = read_trace(tmp_path / "t.jsonl")
    assert sorted(map(to_line, again.requests)) == sorted(map(to_line, trace.requests))
    assert (again.seed, again.title) == (3, "a title")
    assert [r.arrival for r in again.requests] == sorted(r.arrival for r in trace.requests)


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path):
    file, lines = tmp_path / "t.jsonl", [to_line(r) for r in synthesise(1).requests[:1]] * 2
    file.write_text("\n".join([header(), *lines])[:-20])
    assert len(read_trace(file).requests) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON object"),
        ("[]", "no JSON object"),
        ('{"arrival": 0, "prompt": 4}', "'output' is missing"),
        ('{"arrival": -1, "prompt": 4, "output": 4}', "arrival is a number of seconds"),
        ('{"arrival": 0, "prompt": 4, "output": 0}', "output is a whole number from 1"),
        ('{"arrival": 0, "prompt": 4, "output": 4, "skills": {"x": {"right": [[0, 1.5]]}}}', "a chance is a number"),
        ('{"arrival": 0, "prompt": 4, "output": 4, "skills": {"x": 3}}', "no request of a trace"),
        ('{"arrival": 0, "prompt_ids": [], "output_ids": [1]}', "one token at least"),
        ('{"arrival": 0, "prompt_ids": [1], "output_ids": ["a"]}', "a token is a whole number"),
        ('{"arrival": 0, "prompt_ids": [1], "output_ids": [1], "seen": {"x": [[0]]}}', "no request of a trace"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str):
    file = tmp_path / "t.jsonl"
    file.write_text(f"{header()}\n{to_line(synthesise(1).requests[0])}\n{line}\n")
    with pytest.raises(BadInput, match=f"t.jsonl, line 3.*{said}") as error:
        read_trace(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{}\n", '{"headstart_trace": 2}\n', "text\n", header() + "\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(BadInput, match=r"t\.jsonl"):
        read_trace(tmp_path / "t.jsonl")
    with pytest.raises(BadInput, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_costs_come_from_a_file_or_by_name(tmp_path: Path):
    assert read_machine("gpu").name == "gpu"
    kept = Costs(POINTS).to_dict() | {"drafters": {"eagle3": {"seconds_by_level": 0.001, "seconds_by_row": 0}}}
    (tmp_path / "mine.json").write_text(json.dumps(kept | {"around": 0.002}))
    mine = read_machine(str(tmp_path / "mine.json"))
    assert mine.costs.of(1) == pytest.approx(0.010) and mine.around == 0.002
    assert mine.work["eagle3"].of(3, 3) == pytest.approx(0.003)
    assert not mine.ahead and not mine.reading
    kept["reading"] = {"eagle3": {"seconds_by_prompt": 0.5, "seconds_by_token": 0.25}}
    kept["deciding"] = {"seconds_by_decision": 0.5, "seconds_by_request": 0.125}
    kept["changing"] = 0.25
    (tmp_path / "mine.json").write_text(json.dumps(kept))
    mine = read_machine(str(tmp_path / "mine.json"))
    assert mine.ahead and mine.deciding.of(1, 4) == 1.0 and mine.reading["eagle3"].of(1, 10) == 3.0
    assert mine.changing == 0.25
    for key in ("reading", "deciding"):
        (tmp_path / "mine.json").write_text(json.dumps(kept | {key: {"eagle3": {"seconds": 1}}}))
        with pytest.raises(BadInput, match="is missing"):
            read_machine(str(tmp_path / "mine.json"))
    for broken in ("", "[]", "{}", '{"seconds_by_rows": {"1": -1}, "seconds_by_row_and_context": 0}'):
        (tmp_path / "mine.json").write_text(broken)
        with pytest.raises(BadInput, match="cannot be used"):
            read_machine(str(tmp_path / "mine.json"))
    with pytest.raises(BadInput, match="cpu, gpu, h200, node"):
        read_machine("cray")


# ------------------------------------------------------------------ traffic that is made up
def test_the_same_seed_is_the_same_traffic_and_another_one_is_not():
    assert synthesise(4) == synthesise(4) != synthesise(5)
    slow, fast = synthesise(4, 1.0), synthesise(4, 0.5)
    assert [r.output for r in slow.requests] == [r.output for r in fast.requests]
    assert [r.arrival for r in fast.requests] == pytest.approx([r.arrival / 2 for r in slow.requests], abs=1e-5)


def test_the_same_question_has_the_same_answer():
    trace = synthesise(6)
    one, two = Answers(trace, 0), Answers(trace, 0)
    for name in trace.drafters:
        for position in (7, 3, 7):
            assert one.propose(name, position, 5) == two.propose(name, position, 5)
            short, long = one.propose(name, position, 2), one.propose(name, position, 5)
            assert short.tokens == long.tokens[:2]


# ------------------------------------------------------------------ the clock
def test_plain_decoding_takes_what_is_computed_by_hand():
    """Two requests at once: their prompts in two steps, then one token each in every step until the shorter one ends."""
    trace = Trace((Arrival(0.0, 40, 10), Arrival(0.0, 40, 30)))
    plain, _ = replay(trace, "adaptive", max_batch_tokens=64)
    cost = Costs(POINTS)
    seconds = cost.of(64) + cost.of(17) + 8 * cost.of(2) + 21 * cost.of(1) + 31 * 0.002
    assert (plain.steps, plain.tokens) == (31, 40)
    assert plain.seconds == pytest.approx(seconds, rel=1e-9)


def test_a_request_that_comes_later_finds_an_idle_engine():
    trace = Trace((Arrival(0.0, 1, 10), Arrival(100.0, 1, 10)))
    plain, _ = replay(trace, "adaptive")
    assert plain.latency == pytest.approx(10 * 0.012) and plain.seconds == pytest.approx(20 * 0.012)


def test_no_more_requests_run_than_may():
    trace = Trace(tuple(Arrival(0.0, 1, 10) for _ in range(4)))
    plain, _ = replay(trace, "adaptive", max_num_seqs=2)
    assert plain.steps == 20 and plain.seconds == pytest.approx(20 * (0.011 + 0.002))


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
def test_a_planted_drafter_is_as_fast_as_the_formula_says(chance: float):
    tokens = 4
    _, own = replay(steady(chance, 12_000 if chance != 0.5 else 30_000), f"fixed:eagle3:{tokens}")
    brought = sum(chance**i for i in range(tokens + 1))
    seconds = Costs(POINTS).of(1 + tokens) + tokens * 0.001 + 0.002
    assert own.tokens_per_second == pytest.approx(brought / seconds, rel=0.01)
    assert own.wasted == pytest.approx(1 - (brought - 1) / tokens, abs=0.01)
    assert own.ratio == pytest.approx(brought * 0.012 / seconds, rel=0.01)


def test_adaptive_finds_what_pays_and_leaves_what_does_not():
    _, good = replay(steady(0.9), "adaptive")
    _, bad = replay(steady(0.02, sure=0.1), "adaptive")
    assert good.ratio > 1.8 and bad.ratio > 0.98


def test_goodput_chooses_what_the_formula_of_smartspec_says():
    """arXiv 2406.14066: tokens (1 - a^(k+1)) / (1 - a) of each request, by the step's seconds, for the whole batch."""
    config, asked = SpeculativeConfig("eagle3", num_speculative_tokens=8), {}
    policy = GoodputPolicy(config, lambda r: ("eagle3",))
    policy.costs = Costs(POINTS)
    for company in (1, 8, 32):
        requests = [Request([1], SamplingParams(), 0) for _ in range(company)]
        best = max(range(9), key=lambda k: (1 - 0.7 ** (k + 1)) / 0.3 / Costs(POINTS).of(company * (1 + k)))
        wishes = policy.ask(requests, [{} for _ in requests], Load(company, 0, 0))
        asked[company] = best
        assert wishes == [{"eagle3": Wish(best, best)} if best else {} for _ in requests]
    assert asked[1] > asked[32]
    _, good = replay(steady(0.9), "goodput:eagle3:8")
    _, bad = replay(steady(0.02), "goodput:eagle3:8")
    assert good.ratio > 1.8 and 0.9 < bad.ratio < 1.0


def test_noise_troubles_the_policy_and_not_the_clock():
    trace = steady(0.6, 300)
    assert replay(trace, "fixed:eagle3:3", noise=0.3) == replay(trace, "fixed:eagle3:3", noise=0.0)
    assert replay(trace, "adaptive", noise=0.3)[0] == replay(trace, "adaptive")[0]


@pytest.mark.parametrize("name", PRESETS)
def test_auto_hardly_ever_loses_on_random_traffic(name: str):
    """The whole bar: `headstart simulate --synthetic 1000`."""
    ratios = []
    for seed in range(10):
        trace = synthesise(seed, PRESETS[name].tick)
        plain, own = replay(trace, "auto", PRESETS[name], noise=0.05)
        assert plain.tokens == own.tokens == trace.tokens
        ratios.append(own.ratio)
    assert min(ratios) > 0.98, ratios


# ------------------------------------------------------------------ devices that draft by themselves
AHEAD = Machine(
    "ahead", Costs(POINTS), {"eagle3": Work(0.001, 0.0)}, 0.002, {"eagle3": Work(0.003, 0.0)}, Work(0.004, 0.0)
)


def test_auto_is_the_policy_that_such_a_machine_has():
    policies = [Replay(steady(0.5), [], Entrant.parse("auto"), m, Setting()).policy for m in (MACHINE, AHEAD)]
    assert [type(p) for p in policies] == [AdaptivePolicy, AheadPolicy]
    periods = policies[1].periods
    assert periods.of(None, 1) == pytest.approx(0.012)
    assert periods.of(Mode("eagle3", 15, 5), 4) == pytest.approx(Costs(POINTS).of(64) + 0.002 + 5 * 0.001)


def test_what_deciding_and_reading_take_is_counted(monkeypatch):
    plain, own = replay(steady(0.0, 200), "auto", AHEAD)
    assert plain.times["around"] == pytest.approx(200 * 0.002)
    assert own.times["around"] == pytest.approx(own.steps * 0.002), "it was decided while the device was at work"
    monkeypatch.setattr(AheadPolicy, "catch_up", lambda policy, busy: None)
    _, own = replay(steady(0.0, 200), "auto", AHEAD)
    decisions = (own.times["around"] - own.steps * 0.002) / 0.004
    assert decisions == pytest.approx(round(decisions)) and 1 < decisions < 9
    assert own.asked["eagle3"] and own.times["draft"] < 0.1 * own.seconds
    unread, read = (replay(steady(0.0, 200, prompt=n), "fixed:eagle3:2", AHEAD)[1] for n in (1, 30))
    assert read.times["draft"] == pytest.approx(unread.times["draft"] + 0.003), "one token is not read"


def test_a_decision_that_changes_nothing_is_made_behind_the_devices_back():
    own = Replay(steady(0.9, 200), [], Entrant.parse("ahead"), AHEAD, Setting())
    request, plan = Request([1], SamplingParams(), 0, id="0"), Plan()
    request.computed = 1
    plan.add(Planned(request, 1, True))
    own._asked, own._asking, own._thoughts = [{}], [request], 1
    assert own._in_sight(plan, drafts=False)[0] == AHEAD.decision(1) > 0, "somebody came"
    assert own._in_sight(plan, drafts=False)[0] == 0.0
    own._asked = [{"eagle3": Wish(2, 2)}]
    assert own._in_sight(plan, drafts=True)[0] == AHEAD.decision(1), "somebody begins to draft"


def test_a_device_computes_rows_for_drafts_that_it_did_not_find():
    """It was told to before anyone knew. A host that drafts knows how many there are."""
    trace = Trace((Arrival(0.0, 1, 100, {"ngram": Skill(((0.0, 0.0),), found=0.0)}),))
    for machine, rows in ((AHEAD, 4), (MACHINE, 1)):
        _, own = replay(trace, "fixed:ngram:3", machine)
        nearly_all = own.times["target"] / (own.steps * Costs(POINTS).of(rows))
        assert own.drafted == 0 and nearly_all == pytest.approx(1, abs=0.01)


def test_coming_and_going_takes_longer_where_not_all_is_plain():
    slow = replace(AHEAD, changing=0.5)
    (plain, own), (same, slower) = (replay(_three(), "fixed:eagle3:2", machine) for machine in (AHEAD, slow))
    assert plain == same
    assert slower.steps == own.steps
    assert slower.seconds - own.seconds == pytest.approx(3 * 0.5), "all come, and two leave the others"


def _three() -> Trace:
    """Requests that end one behind the other."""
    return Trace(tuple(Arrival(0.0, 30, n, {"eagle3": Skill(((0.0, 0.5),))}) for n in (5, 10, 15)), 1)


def test_it_finds_out_what_pays_where_drafts_are_not_seen():
    _, good = replay(steady(0.9), "auto", AHEAD, noise=0.05)
    _, fixed = replay(steady(0.9), "fixed:eagle3:4", AHEAD)
    _, bad = replay(steady(0.02), "auto", AHEAD, noise=0.05)
    assert good.ratio > 0.9 * fixed.ratio > 1.8 and bad.ratio > 0.98
    assert replay(steady(0.6), "ahead", AHEAD, noise=0.05) == replay(steady(0.6), "ahead", AHEAD, noise=0.05)


def test_a_replay_is_the_same_in_every_process():
    """Names have another order in sets of each."""
    said = []
    for seed in ("1", "2"):
        program = Path(sys.executable).with_name("headstart")
        command = [program, "simulate", "-n", "4", "--costs", "gpu", "--json", "--quiet"]
        done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True)
        said.append(json.loads(done.stdout))
    assert said[0] == said[1]


def test_a_head_that_rested_drafts_from_the_next_step_on():
    run = Replay(steady(0.9), [], Entrant.parse("ahead"), AHEAD, Setting())
    request, wishes = Request([1], SamplingParams(), 0, id="0"), [{"eagle3": Wish(2, 2)}]
    run._chosen["0"] = ("eagle3",)
    assert run._attended([request], wishes) is wishes
    assert run._attended([request], [{}]) == [{}], "it rests"
    assert run._attended([request], wishes) == [{}] and run._attended([request], wishes) is wishes


def test_a_tree_goes_at_least_as_deep_as_the_chain_in_it():
    answers = Answers(steady(0.5, 400), 0)
    right = [
        [sum(t >= FIRST_TOKEN for t in answers.propose("eagle3", at, 5, wide).tokens) for at in range(300)]
        for wide in (False, True)
    ]
    assert all(chain <= tree for chain, tree in zip(*right, strict=True)) and sum(right[1]) > 1.1 * sum(right[0])


# ------------------------------------------------------------------ recorded
@register("test-counts-up")
class CountsUp(Drafter):
    """Right or wrong by chance, with branches."""

    def propose(self, view: View) -> Draft:
        return Draft.of([Tree([(r.tokens[-1] + i) % 200 for i in (0, 1, 2)], [-1, -1, 0]) for r in view.requests])


def record(tmp_path: Path, method: str, count: int = 3) -> tuple[Trace, list[list[int]]]:
    file = tmp_path / "traffic.jsonl"
    engine = harness.engine(tiny.model("llama"), {"method": method, "num_speculative_tokens": 4})
    engine.policy = recording = Recording(engine.policy, file)
    asked = [harness.request(p, max_tokens=30, eos=None) for p in tiny.prompts(count)]
    texts = harness.run(engine, asked)
    recording.close()
    return read_trace(file), texts


def test_what_an_engine_does_is_recorded_and_replayed(tmp_path: Path):
    trace, texts = record(tmp_path, "ngram")
    assert sorted(list(r.output_ids) for r in trace.requests) == sorted(texts)
    assert all(r.prompt and r.is_recorded for r in trace.requests)
    first, second = (replay(trace, "fixed:ngram:4") for _ in range(2))
    assert first == second and first[1].tokens == 90
    seen = [s for r in trace.requests for s in r.seen.get("ngram", ())]
    assert first[1].drafted > 0 and first[1].asked["ngram"] > 0
    assert first[1].accepted == sum(sum(s.right) for s in seen)  # drafted for real, it does the same again


def test_verdicts_are_what_the_text_said(tmp_path: Path):
    trace, _ = record(tmp_path, "test-counts-up")
    for r in trace.requests:
        text = (*r.prompt_ids, *r.output_ids)
        for s in r.seen["test-counts-up"]:
            at = r.prompt + s.position
            last, said = text[at - 1], text[at]
            assert s.right[0] == (said in (last % 200, (last + 1) % 200))
    _, own = replay(trace, "fixed:test-counts-up:2")
    assert own.tokens == 90 and own.accepted <= own.drafted


def test_a_recorded_drafter_with_weights_is_right_where_it_was():
    seen = (Seen(0, (True, True)), Seen(2, (True, False)), Seen(10, (False,), (0.25,)))
    trace = Trace((Arrival(0.0, 1, 20, {}, (5,), tuple(range(30, 50)), {"eagle3": seen}),))
    answers = Answers(trace, 0)
    assert answers.choices(["eagle3", "ngram", "medusa"]) == ("eagle3", "ngram")
    assert answers.propose("eagle3", 0, 5).tokens[:3] == [30, 31, 32]
    assert answers.propose("eagle3", 0, 5).tokens[3] != 33
    assert answers.propose("eagle3", 9, 2).tokens[0] != 39 and answers.propose("eagle3", 9, 1).confidence == [0.25]


def test_a_recording_survives_a_kill_and_passes_everything_on(tmp_path: Path):
    recording = Recording(FixedPolicy(SpeculativeConfig("ngram"), lambda r: ("ngram",)), tmp_path / "t.jsonl")
    request = harness.request([1, 2, 3])
    assert recording.ask([request], [{}], tiny_load())[0]["ngram"].nodes == 5
    request.tokens += [4, 5]
    recording.release(request)
    assert not recording.cuts and not recording.is_quiet(request)
    assert read_trace(tmp_path / "t.jsonl").requests[0].output_ids == (4, 5)  # before it is closed
    quiet = harness.request([6])  # nobody was asked about it
    quiet.tokens += [7]
    recording.release(quiet)
    assert read_trace(tmp_path / "t.jsonl").requests[1].output_ids == (7,)
    with pytest.raises(BadInput, match="cannot be written"):
        Recording(recording, tmp_path / "none" / "t.jsonl")


def tiny_load() -> Any:
    from headstart.policy import Load

    return Load(1, 0, 0)


# ------------------------------------------------------------------ the command
def headstart(*args: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *args])


def test_the_command_prints_a_table_and_the_same_numbers_each_time():
    args = ("--synthetic", "2", "--costs", "gpu", "--policy", "adaptive,fixed:eagle3:5", "--json")
    first, second = headstart(*args), headstart(*args)
    assert first.exit_code == 0 and first.stdout == second.stdout
    told = json.loads(first.stdout)
    assert [s["policy"] for s in told["summaries"]] == ["none", "adaptive", "fixed:eagle3:5"]
    assert told["summaries"][0]["median"] == 1.0 and len(told["traces"]) == 2
    table = headstart("--synthetic", "1", "--costs", "cpu", "--policy", "none").stdout
    assert "lose over 2%" in table and "cpu" in table


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "--trace FILE or --synthetic"),
        (("--synthetic", "1", "--trace", "x"), "--trace FILE or --synthetic"),
        (("--trace", "none.jsonl"), "cannot be read"),
        (("--synthetic", "1", "--costs", "cray"), "cpu, gpu, h200, node"),
        (("--synthetic", "1", "--policy", "clever"), "expected none, auto"),
        (("--synthetic", "1", "--policy", "fixed:ngram:99"), "at most 16"),
        (
            ("--synthetic", "1", "--policy", "adaptive,fixed:medusa:3"),
            "the traces tell of eagle3, ngram, suffix, not of medusa",
        ),
        (("--synthetic", "1", "--noise", "7"), "--noise"),
        (("--synthetic", "1", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--synthetic", "1", "--max-batch-tokens", "3"), "--max-batch-tokens"),
    ],
)
def test_a_slip_is_one_sentence(args: tuple[str, ...], said: str):
    done = headstart(*args)
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1
