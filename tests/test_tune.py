"""`headstart tune`: what drafts would have brought, what that is worth, and whether it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart import SamplingParams
from headstart.advise import tune as tuning
from headstart.advise import watched
from headstart.advise.decision import Decision, read
from headstart.advise.tune import Guess, Task, Tuned, best, config_of, decide, modes_of, predict
from headstart.bench.workloads import Prompt, Workload
from headstart.cli import app
from headstart.config import parse_speculative
from headstart.errors import BadInput, ConfigError
from headstart.llm import LLM
from headstart.policy import Errand, StepTimes
from headstart.policy.costs import Costs, Work
from headstart.policy.periods import Mode, Periods
from headstart.scheduler import Plan
from headstart.simulate.machines import Machine, read_machine
from headstart.traffic import Arrival, Seen, Trace, write_trace
from tests import tiny

HEAD = {"method": "eagle3", "model": "some-head"}
TWO, FOUR, TREE = Mode("eagle3", 2, 2), Mode("eagle3", 4, 4), Mode("eagle3", 8, 4)


def machine(row: float = 0.0, level: float = 0.0) -> Machine:
    """A forward takes a second, and so much more for each row behind the first; a drafter so much for a level."""
    return Machine("test", Costs({1: 1.0, 64: 1.0 + 63 * row}), {"eagle3": Work(level, 0.0)})


def recorded(right: list[int], depth: int = 8, length: int = 40) -> Trace:
    """One request; a draft behind the n-th token is right for so many tokens, in turns."""
    seen = tuple(
        Seen(i, (True,) * min(n, depth) + (False,) * (n < depth))
        for i in range(1, length)
        if (n := right[i % len(right)]) >= 0
    )
    return Trace((Arrival(0.0, 5, length, {}, tuple(range(5)), tuple(range(10, 10 + length)), {"eagle3": seen}),))


# ------------------------------------------------------------------ what is seen
def test_a_draft_is_seen_behind_every_token_and_the_text_is_that_of_plain_decoding() -> None:
    loaded = tiny.with_tools("x")
    texts = [[5, 6, 7, 8], [9, 8, 7]]
    with LLM(loaded, speculative=None) as llm:
        wanted = [o.token_ids for o in llm.generate(texts, SamplingParams(temperature=0, max_tokens=12))]
    own = tiny.with_tools("draft")
    found = watched.watch(
        loaded, {"method": "draft_model", "model": "x", "num_speculative_tokens": 3}, texts, 12, 2, draft=own
    )
    assert sorted(list(r.output_ids) for r in found.trace.requests) == sorted(wanted)
    for request in found.trace.requests:
        assert request.arrival == 0.0
        seen = request.seen["draft_model"]
        assert [s.position for s in seen] == list(range(len(request.output_ids) - 1)), "one behind every token"
        assert all(all(s.right) for s in seen[:-3]), "it drafts for itself"
    assert found.work.of(3, 3) > 0


def test_a_path_of_a_tree_that_ends_goes_no_further() -> None:
    request = recorded([2], depth=8).requests[0]
    short = replace(request, seen={"eagle3": (Seen(1, (True, True)), Seen(2, (True, False)), Seen(3, (True,) * 4))})
    assert [s.right for s in watched._ended(short, 4).seen["eagle3"]] == [
        (True, True, False), (True, False), (True, True, True, True),
    ]  # fmt: skip


def test_work_is_what_levels_and_rows_take() -> None:
    def step(levels: int, rows: int, prefill: int = 0, more: float = 0.0) -> StepTimes:
        errand = Errand("eagle3", 1, levels, rows, 0.5 * levels + 0.25 * rows + more)
        return StepTimes(0, 0, 0, 0, 1, prefill, errands=(errand,))

    steps = [step(n, n * b) for n in (1, 2, 4) for b in (1, 3)]
    found = watched._work([*steps, step(4, 4, prefill=9, more=50.0)])
    assert found.level == pytest.approx(0.5) and found.row == pytest.approx(0.25)
    assert watched._reading([*steps, step(2, 2, 9, more=18.0)], found, 9) == pytest.approx(2.0)
    alike = watched._work([step(2, 2)] * 5)
    assert alike.of(2, 2) == pytest.approx(1.5) and min(alike.level, alike.row) >= 0
    assert watched._work([]) == Work()


def test_acceptance_counts_drafts_behind_every_token() -> None:
    assert tuning.acceptance(recorded([0, 1, 3], depth=3, length=31), "eagle3") == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert tuning.acceptance(recorded([1]), "ngram") == []


# ------------------------------------------------------------------ what is predicted
def test_a_prediction_is_what_can_be_reckoned_by_hand() -> None:
    """Drafts are always right and cost nothing: γ + 1 tokens for each step; each level a tenth: less."""
    trace = recorded([8], length=41)
    (free,) = predict(trace, [TWO], [1], lambda mode: machine())
    assert free.predicted == pytest.approx(41 / 14)
    (dear,) = predict(trace, [TWO], [1], lambda mode: machine(level=0.1))
    assert dear.predicted == pytest.approx(free.predicted / 1.2, rel=0.05)
    (rows,) = predict(trace, [FOUR], [1], lambda mode: machine(row=0.25))
    assert rows.predicted == pytest.approx(5 / 2, rel=0.08)
    (wide,) = predict(trace, [TREE], [1], lambda mode: machine(row=0.25))
    assert wide.predicted == pytest.approx(5 / 3, rel=0.08), "all nodes of a tree are rows"


def test_a_device_whose_whole_steps_are_known_is_predicted_from_them() -> None:
    periods = Periods()
    for mode, seconds in ((None, 1.0), (TWO, 1.2), (FOUR, 1.6), (Mode("eagle3", 15, 5), 3.0)):
        periods.put(mode, 1, seconds)
    device = watched.Device(Machine("here", Costs(), {}), periods, (TWO, FOUR, Mode("eagle3", 15, 5)), 0.5)
    three = device.with_drafter(Mode("eagle3", 3, 3), Work(), 0.0)
    assert three.errand(Errand("eagle3", 1, 3, 3), 1) == pytest.approx(0.4), "between two and four"
    assert device.with_drafter(Mode("eagle3", 5, 5), Work(), 0.0).errand(Errand("eagle3", 1, 5, 5), 1) == pytest.approx(
        0.8
    )
    assert device.with_drafter(Mode("eagle3", 8, 4), Work(), 0.0).errand(Errand("eagle3", 1, 4, 8), 1) == pytest.approx(
        2.0
    )
    assert device.knows(TREE) and not device.knows(Mode("ngram", 3, 3))
    plan = Plan()
    assert three.forward(plan, 1, 0.0) == pytest.approx(1.0)
    trace = recorded([8], length=41)
    (found,) = predict(trace, [TWO], [1], lambda mode: device.with_drafter(mode, Work(), 0.0))
    assert found.predicted == pytest.approx((41 + 2.5) / (14 * 1.2 + 2.5), rel=0.06)


# ------------------------------------------------------------------ what is decided
def test_the_best_are_tried_and_each_number_of_requests_has_its_own() -> None:
    guesses = [
        Guess(TWO, 1, 1.5),
        Guess(FOUR, 1, 1.9),
        Guess(TREE, 1, 1.8),
        Guess(TWO, 16, 1.1),
        Guess(FOUR, 16, 0.7),
        Guess(TREE, 16, 0.5),
    ]
    assert best(guesses, 2) == [FOUR, TWO] and best(guesses, 9) == [FOUR, TWO, TREE]


def test_a_schedule_where_numbers_of_requests_want_different_lengths(tmp_path) -> None:
    found = Tuned(
        [
            Guess(FOUR, 1, 1.9, 1.8),
            Guess(TWO, 1, 1.5, 1.6),
            Guess(FOUR, 4, 1.0, 0.9),
            Guess(TWO, 4, 1.3, 1.2),
            Guess(TWO, 16, 0.9, 0.8),
            Guess(FOUR, 16, 0.5, 0.5),
        ],
        {},
    )
    decision = decide("target", found, HEAD, (1, 4, 16))
    assert decision.speculative == {
        "method": "eagle3", "model": "some-head", "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 2], [9, 1 << 16, 0]],
    }  # fmt: skip
    assert "1.80 times plain decoding at 1 at once, measured" in decision.reasons["method"]
    assert decision.config.batch_size_schedule[0] == (1, 2, 4)
    decision.write(tmp_path / "a" / "tuned.json")
    assert read(tmp_path / "a" / "tuned.json") == decision


def test_a_tree_is_switched_off_where_it_does_not_pay_and_chains_are_another_choice() -> None:
    tree = [Guess(TREE, 1, 1.9, 1.8), Guess(TREE, 8, 0.9, 0.66)]
    found = decide("target", Tuned([*tree, Guess(TWO, 1, 1.4, 1.4), Guess(TWO, 8, 0.9, 0.9)], {}), HEAD, (1, 8))
    assert found.speculative["tree"] and found.speculative["num_draft_nodes"] == 8
    assert found.speculative["num_speculative_tokens_per_batch_size"] == [[1, 2, 8], [3, 1 << 16, 0]]
    assert "8 at once" not in found.reasons["method"] and not parse_speculative(found.speculative)[1]
    chain = decide("target", Tuned([*tree, Guess(TWO, 1, 1.7, 1.7), Guess(TWO, 8, 1.2, 1.2)], {}), HEAD, (1, 8))
    assert "tree" not in chain.speculative and chain.speculative["num_speculative_tokens"] == 2


def test_nothing_is_a_decision_too() -> None:
    found = Tuned([Guess(TWO, 1, 1.2, 0.9), Guess(FOUR, 1, 1.01)], {})
    assert decide("target", found, HEAD, (1,)).speculative == {}
    assert decide("target", Tuned([], {}), HEAD, (1,)).speculative == {}


def test_every_setting_is_one_that_the_engine_takes() -> None:
    modes = modes_of(Task("x", Workload("w", ()), draft=HEAD))
    assert {m.drafter for m in modes} == {"ngram", "suffix", "eagle3"} and any(m.nodes > m.depth for m in modes)
    for mode in modes:
        config, notes = parse_speculative(config_of(mode, HEAD))
        assert not notes and config.nodes == mode.nodes and config.num_speculative_tokens == mode.depth
        assert config.model == (HEAD["model"] if mode.drafter == "eagle3" else None)


# ------------------------------------------------------------------ the whole
def test_tuning_predicts_tries_and_says_both(monkeypatch) -> None:
    one = tiny.with_tools("x")
    prompts = tuple(Prompt(str(i), "chat", tuple(range(5 + i, 15 + i))) for i in range(3))
    task = Task("x", Workload("mine", prompts), (1, 2), tokens=12, rounds=1, tries=2)
    told: list[str] = []
    found, decision = tuning.tune(one, task, told.append)
    tried = [g for g in found.guesses if g.measured is not None]
    assert len({g.mode for g in tried}) == 2 and {g.at_once for g in tried} == {1, 2}
    assert all(g.error == pytest.approx(g.predicted / g.measured - 1) for g in tried if g.measured)
    assert found.same_text and set(found.auto) == set(found.plain) == {1, 2}
    assert len(told) <= tuning.parts(task) and any("predicting ngram 3" in what for what in told)
    assert not decision.speculative or decision.speculative["method"] in ("ngram", "suffix")
    long = replace(task, tokens=100_000)
    with pytest.raises(BadInput, match="choose shorter prompts"):
        tuning.tune(one, long)


def traffic(path: Path) -> Path:
    """Recorded texts that repeat themselves."""
    ids = tuple(list(range(20, 30)) * 6)
    write_trace(path, Trace(tuple(Arrival(0.0, 10, 50, {}, ids[:10], ids[10:], {}) for _ in range(3))))
    return path


def test_recorded_traffic_alone_is_enough_for_drafters_without_weights(tmp_path) -> None:
    file = traffic(tmp_path / "traffic.jsonl")
    done = CliRunner().invoke(app, ["tune", "--trace", str(file), "--costs", "gpu", "--concurrency", "1,2", "--json"])
    told = json.loads(done.stdout)
    best = {s["at_once"]: s["predicted"] for s in told["settings"] if s["setting"] == "ngram 8"}
    assert done.exit_code == 0 and best[1] > 2 and told["decision"]["speculative"]["method"] in ("ngram", "suffix")
    shown = CliRunner().invoke(app, ["tune", "--trace", str(file), "--out", str(tmp_path / "tuned.json")])
    assert "1 at once: times plain decoding" in shown.output and "--speculative-config" in shown.output
    assert read(tmp_path / "tuned.json").speculative


def test_numbers_of_requests_count_for_sparse_traffic_and_nothing_is_said_beyond_what_was_recorded(tmp_path) -> None:
    ids = tuple(list(range(20, 30)) * 6)
    seen = {"eagle3": tuple(Seen(i, (True, True, True)) for i in range(1, 49))}
    apart = Trace(tuple(Arrival(5.0 * i, 10, 50, {}, ids[:10], ids[10:], seen) for i in range(4)))
    found = tuning.from_traffic(apart, read_machine("gpu"), (1, 4), ("ngram",))
    one, four = (next(g.predicted for g in found.at(n) if g.mode == Mode("ngram", 8, 8)) for n in (1, 4))
    assert four < one
    assert max(g.mode.depth for g in found.guesses if g.mode.drafter == "eagle3") == 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Name the model"),
        (["x", "--trace", "y"], "leave one of the two out"),
        (["smollm2", "--concurrency", "0"], "--concurrency 0 is not usable"),
        (["smollm2", "--methods", "ngrams"], "Did you mean"),
        (["smollm2", "--max-tokens", "0"], "1 or more"),
        (["smollm2", "--prompts", "random"], "tells nothing"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["smollm2", "--out", "."], "is a folder"),
    ],
)
def test_mistakes_are_one_sentence(args: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["tune", *args])
    assert done.exit_code == 2 and said in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no", "is not JSON"),
        ("[]", "no file of headstart tune"),
        ('{"headstart_tuned": 1}', "target should be text"),
        ('{"headstart_tuned": 1, "target": "x", "speculative": {"methods": "ngram"}}', "Did you mean"),
    ],
)
def test_a_file_that_tune_did_not_write_is_said(tmp_path, text: str, said: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(BadInput, match=said):
        read(tmp_path / "f.json")
    with pytest.raises(BadInput, match="cannot be read"):
        read(tmp_path / "none.json")


def test_what_was_tuned_is_what_runs(tmp_path) -> None:
    from headstart.cli.options import SpeculationOptions

    file = tmp_path / "tuned.json"
    Decision("x", {"method": "ngram", "num_speculative_tokens": 2}).write(file)
    assert SpeculationOptions(tuned=str(file)).config().num_speculative_tokens == 2
    with pytest.raises(ConfigError, match="leave out --drafter"):
        SpeculationOptions(tuned=str(file), drafter="suffix").config()
    Decision("x").write(file)
    assert SpeculationOptions(tuned=str(file)).config().method == "none"


def test_what_traffic_alone_decided_names_no_target_and_no_head(tmp_path) -> None:
    file = tmp_path / "tuned.json"
    Decision("", {"method": "ngram", "num_speculative_tokens": 2}).write(file)
    assert "Name the target" in CliRunner().invoke(app, ["export", "vllm", "--tuned", str(file)]).output
    done = CliRunner().invoke(app, ["export", "vllm", "--tuned", str(file), "--target", "owner/name"])
    assert done.exit_code == 0 and '"num_speculative_tokens": 2' in done.output.replace("'", '"')
    Decision("", {"method": "eagle3", "num_speculative_tokens": 2}).write(file)
    assert "add --head" in CliRunner().invoke(app, ["export", "vllm", "--tuned", str(file), "--target", "a/b"]).output


def test_what_was_tuned_is_told_to_other_engines_as_far_as_they_have_it(tmp_path, capsys) -> None:
    from headstart.cli.elsewhere import OtherOptions, method
    from headstart.cli.options import SpeculationOptions

    file = tmp_path / "tuned.json"
    Decision("x", config_of(TREE, HEAD) | {"num_speculative_tokens_per_batch_size": [[1, 2, 8], [3, 65536, 0]]}).write(
        file
    )
    spec = SpeculationOptions(tuned=str(file))
    assert method(spec, OtherOptions(engine="vllm")).config == HEAD | {
        "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 65536, 0]],
    }  # fmt: skip
    assert "num_speculative_tokens_per_batch_size" not in method(spec, OtherOptions(engine="llamacpp")).config
    assert "no trees" in (said := capsys.readouterr().err) and "no lengths by batch size" in said
    for text, wrong in (
        ('{"num_speculative_tokens": 3}', "names no method"),
        ('{"method": "ngram", "num_speculative_tokens": "x"}', "'x' is not usable"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            method(SpeculationOptions(speculative_config=text), OtherOptions(engine="llamacpp"))
