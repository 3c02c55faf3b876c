"""Drafts for a target: what is found on a disk, how it is ranked, why it is refused, and what is well known."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headstart.advise import families, forecast, pairs, stores
from headstart.advise.facts import Facts, look
from headstart.advise.forecast import Guess, Hardware, Times, by_name, expected_tokens, seconds
from headstart.advise.vocabularies import relate
from headstart.cli import app
from headstart.errors import BadInput
from headstart.models.builtin import head_of
from tests.test_advise import LLAMA2_7B, LLAMA_8B, pretend
from tests.test_check import WORDS, facts, small, vocabulary, write_gguf
from tests.test_ollama import DIGEST, pull

SMALL = LLAMA_8B | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
CPU = Hardware("CPU", 1e10, 1e12, 2e-5, here=True)
OTHER_WORDS = [*WORDS[:10], "zebra", *WORDS[11:]]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without models, of a known speed."""
    home = tmp_path / "home"
    monkeypatch.setenv("HEADSTART_CACHE", str(home / "headstart"))
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "ollama"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(forecast, "this_machine", lambda: CPU)
    return home


def folder(path: Path, config: dict[str, Any] = SMALL, words: list[str] = WORDS) -> Path:
    """A model with all its headers and a tokenizer."""
    from tokenizers import Tokenizer, models

    pretend(path, config)
    Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [])).save(str(path / "tokenizer.json"))
    return path


def in_cache(home: Path, repo: str, config: dict[str, Any] = SMALL, main: bool = True) -> Path:
    """As the hub's client leaves it."""
    root = home / "hub" / f"models--{repo.replace('/', '--')}"
    out = folder(root / "snapshots" / "0123abcd", config)
    (root / "refs").mkdir()
    if main:
        (root / "refs" / "main").write_text("0123abcd")
    return out


def in_ollama(home: Path, name: str = "small", tag: str = "1b", digest: str = DIGEST, **more: Any) -> None:
    (home / "ollama" / "manifests").mkdir(parents=True, exist_ok=True)
    (home / "ollama" / "blobs").mkdir(parents=True, exist_ok=True)
    write_gguf(pull(home / "ollama", f"registry.ollama.ai/library/{name}/{tag}", digest), **more)


def names(found: list[stores.Found]) -> list[str]:
    """But for the head that comes along."""
    return [one.name for one in found if one.path != head_of("smollm2", "eagle3")]


def model(facts: Facts, problem: str = "") -> stores.Model:
    return stores.Model(stores.Found(facts.name, stores.FOLDER, facts.path), facts, problem)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["pairs", *arguments])


# ------------------------------------------------------------------ what is on disk
def test_folders_are_searched_and_models_are_not(tmp_path) -> None:
    top = tmp_path / "models"
    folder(top / "a" / "deep" / "model")
    folder(top / "a" / "deep" / "model" / "checkpoint")
    folder(top / ".hidden" / "model")
    folder(top / "1" / "2" / "3" / "4" / "5" / "too-deep")
    for name in ("one.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        write_gguf(top / name)
    (top / "notes.txt").write_text("no model")
    found = [str(Path(name).relative_to(top)) for name in names(stores.find([top]))]
    assert found == ["big-00001-of-00002.gguf", "one.gguf", "a/deep/model"]
    assert names(stores.find([top / "one.gguf"])) == [str(top / "one.gguf")]
    with pytest.raises(BadInput, match="is no folder and no GGUF file"):
        stores.find([tmp_path / "nowhere"])


def test_the_hubs_cache_has_models_by_id_and_gguf_by_path(empty, tmp_path) -> None:
    in_cache(empty, "owner/name")
    other = in_cache(empty, "owner/branch", main=False)
    file = write_gguf(in_cache(empty, "owner/quants").parent / "0123abcd" / "q.gguf")
    (file.parent / "config.json").unlink()
    (empty / "hub" / "models--owner--nothing").mkdir()
    (empty / "hub" / "datasets--owner--data" / "snapshots").mkdir(parents=True)
    assert sorted(names(stores.find())) == sorted(["owner/name", str(other), str(file)])
    assert all(stores.read(one).problem == "" for one in stores.find())
    inside = stores.find([empty / "hub"])
    assert str(other.parent.parent.parent / "models--owner--name" / "snapshots" / "0123abcd") in names(inside)
    assert len(names(inside)) == 3, "each once, though they lie in a folder and in the cache"


def test_files_of_the_hub_are_links(empty, tmp_path) -> None:
    """Blobs with links to them; and two names for one folder."""
    snapshot = in_cache(empty, "owner/name")
    blob = tmp_path / "blob"
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    (tmp_path / "again").symlink_to(snapshot)
    assert len(names(stores.find([tmp_path / "again"]))) == 1
    found = stores.read(next(one for one in stores.find() if one.name == "owner/name"))
    assert not found.problem and found.facts is not None and found.facts.weight_bytes > 0


def test_ollamas_store(empty) -> None:
    assert names(stores.find()) == []
    in_ollama(empty, "good", "1b")
    in_ollama(empty, "gone", "1b", "sha256:" + "cd" * 32)
    (empty / "ollama" / "blobs" / f"sha256-{'cd' * 32}").unlink()
    found = {one.name: stores.read(one) for one in stores.find()}
    assert found["ollama:good:1b"].facts is not None and "pull the model again" in found["ollama:gone:1b"].problem


def test_heads_that_come_along_or_lie_in_the_cache(empty) -> None:
    own = empty / "headstart" / "heads" / "mine"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    found = {one.name: stores.read(one) for one in stores.find()}
    along = found[str(head_of("smollm2", "eagle3"))]
    assert along.facts is not None and along.facts.head and found[str(own)].problem


def test_what_is_broken_is_listed_with_its_problem(tmp_path) -> None:
    top = tmp_path / "m"
    cut = folder(top / "cut") / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    folder(top / "bert", SMALL | {"architectures": ["BertModel"]})
    for name, text in (("list", "[]"), ("text", "no JSON"), ("empty", "{}")):
        (top / name).mkdir()
        (top / name / "config.json").write_text(text)
    (top / "lies.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    (top / "none.gguf").write_bytes(b"")
    read = {Path(one.name).name: stores.read(one).problem for one in stores.find([top]) if one.place == stores.FOLDER}
    assert set(read) == {"cut", "bert", "list", "text", "empty", "lies.gguf", "none.gguf"} and all(read.values())
    assert "truncated" in read["cut"] and "no model that writes text (BertModel)" in read["bert"]
    done = run(str(top))
    assert done.exit_code == 0 and "truncated" in done.output


# ------------------------------------------------------------------ the formulas
@given(st.floats(0.01, 0.99), st.integers(1, 8))
def test_tokens_of_a_step_are_what_the_process_gives(alpha: float, gamma: int) -> None:
    """Each token is accepted with the same chance, the first that is not ends the draft, and the target adds one."""
    exact = sum((n + 1) * alpha**n * (1 - alpha) for n in range(gamma)) + (gamma + 1) * alpha**gamma
    assert expected_tokens(alpha, gamma) == pytest.approx(exact, rel=1e-9)
    assert expected_tokens(1.0, gamma) == gamma + 1


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "speedup"), [(0.6, 2, 0.0, 1.96), (0.8, 5, 0.05, 2.95), (0.9, 3, 0.02, 3.24)]
)
def test_where_rows_are_free_it_is_the_formula_of_the_paper(alpha, gamma, c, speedup) -> None:
    """(1 - α^(γ+1)) / ((1 - α)(γc + 1)), theorem 3.8 of Leviathan et al. (2023), computed by hand."""
    spent = Times(lambda rows: 1.0, c, deepest=gamma)
    found = forecast.forecast(Guess(alpha, 0.0, ""), spent)
    wanted = {g: (1 - alpha ** (g + 1)) / ((1 - alpha) * (g * c + 1)) for g in range(1, gamma + 1)}
    assert found.gamma == max(wanted, key=lambda g: wanted[g])
    assert found.speedup == pytest.approx(max(wanted.values())) and wanted[gamma] == pytest.approx(speedup, abs=0.005)


def test_rows_that_cost_make_drafts_shorter_and_never_better() -> None:
    free = Times(lambda rows: 1.0, 0.05)
    dear = Times(lambda rows: 1.0 + 0.3 * (rows - 1), 0.05)
    guess = Guess(0.7, 0.1, "")
    assert forecast.forecast(guess, dear).gamma < forecast.forecast(guess, free).gamma
    assert forecast.forecast(guess, dear).speedup < forecast.forecast(guess, free).speedup
    at_once = Times(lambda rows: 1.0, 0.05, at_once=True)
    assert forecast.forecast(guess, at_once).speedup > forecast.forecast(guess, free).speedup


@given(st.floats(0.05, 0.95), st.floats(0.0, 0.3), st.floats(0.0, 1.0), st.floats(0.0, 0.5))
def test_the_range_holds_the_middle(alpha: float, spread: float, draft: float, row: float) -> None:
    for measured in (False, True):
        spent = Times(lambda rows: 1.0 + row * (rows - 1), draft, measured=measured)
        found = forecast.forecast(Guess(alpha, spread, ""), spent)
        assert found.low <= found.speedup + 1e-9 and found.speedup <= found.high + 1e-9 and 1 <= found.gamma <= 8


def test_a_forward_takes_its_bytes_and_its_products() -> None:
    slow = Hardware("x", 1e9, 1e12, 0.0)
    dense = facts(tied=True, parameters=10**9, weight_bytes=2 * 10**9)
    assert seconds(dense, 1, slow) == pytest.approx(2.0 + 0.002) and seconds(dense, 5, slow) == pytest.approx(
        2.0 + 0.01
    )
    untied = facts(tied=False, parameters=10**9, weight_bytes=2 * 10**9, vocab_size=10**5, hidden=1000)
    assert seconds(untied, 1, slow) == pytest.approx(1.8 + 0.002), "one row of the input embeddings is next to nothing"
    told = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1000}
    mixture = facts(tied=True, parameters=10**9, weight_bytes=2 * 10**9, hidden=1000, layers=25, config=told)
    share = 3 * 1000 * 1000 * 8 * 25 / 1e9
    assert seconds(mixture, 1, slow) == pytest.approx(2.0 * (1 - share * 0.75) + 0.002 * (1 - share * 0.75))
    assert seconds(mixture, 4, slow) > 1.4 * seconds(mixture, 1, slow), "more tokens need more experts"


def test_gpus_by_name() -> None:
    spoken = (
        "H100",
        "NVIDIA H200",
        "GH200",
        "A100-SXM4-80GB",
        "A100 40GB",
        "RTX4090",
        "GeForce RTX 3090 Ti",
        "L40S",
        "T4",
    )
    keys = ("H100", "H200", "GH200", "A100", "A100 40GB", "4090", "3090", "L40S", "T4")
    for name, key in zip(spoken, keys, strict=True):
        assert by_name(name).bandwidth == pytest.approx(forecast.GPUS[key][0] * 1e9 * forecast.REAL[0]), name
    for name in ("toaster", "RTX A1000", "", "40"):
        with pytest.raises(BadInput, match="is not known here"):
            by_name(name)


def test_costs_that_the_engine_kept_here_count(empty) -> None:
    """The newest for this model on this device; what is broken is passed over."""
    from headstart.policy.costs import Costs

    where = empty / "headstart" / "costs"
    where.mkdir(parents=True)
    device = f"{platform.machine()} {platform.processor()}"

    def keep(name: str, told: dict[str, Any], points: dict[int, float], age: int) -> None:
        (where / name).write_text(json.dumps({"facts": told, **Costs(points).to_dict(), "drafters": {}}))
        os.utime(where / name, (10**9 - age, 10**9 - age))

    keep("old.json", {"model": "m", "device": device}, {1: 9.0, 9: 90.0}, age=2)
    keep("new.json", {"model": "m", "device": device}, {1: 1.0, 9: 3.0}, age=1)
    keep("other.json", {"model": "m", "device": "another"}, {1: 5.0}, age=0)
    (where / "broken.json").write_text("{")
    (where / "periods.json").write_text(json.dumps({"facts": {"model": "m", "device": device}, "periods": {}}))
    kept = forecast.kept_costs(["m"], CPU.key)
    assert kept is not None and (kept.of(1), kept.of(9)) == (1.0, 3.0) and forecast.kept_costs(["x"], CPU.key) is None
    spent = forecast.times(facts("m"), small("d"), CPU)
    ratio = seconds(small("d"), 1, CPU) / seconds(facts("m"), 1, CPU)
    assert spent.measured and spent.target(5) == pytest.approx(2.0) and spent.draft == pytest.approx(ratio)
    assert not forecast.times(facts("m"), small("d"), by_name("H100")).measured, "another machine than this one"


# ------------------------------------------------------------------ ranking
def test_what_is_likelier_and_smaller_comes_first() -> None:
    target = facts("Llama-3.1-8B-Instruct")
    near = small("Llama-3.2-1B-Instruct")
    far = small("Qwen-like")
    other = small("Zebra", OTHER_WORDS)
    large = small("Llama-3-large", parameters=7 * 10**9, weight_bytes=14 * 10**9)
    heavy = small("Llama-3-heavy", parameters=3 * 10**9, weight_bytes=6 * 10**9)
    found = pairs.rank(target, [model(m) for m in (other, large, far, heavy, near, target)], CPU)
    assert found.candidates[0].draft.name == near.name and [r.name for r in found.rejections] == [large.name]
    by_model = {c.draft.name: c for c in found.candidates}
    assert set(by_model) == {near.name, far.name, other.name, heavy.name}, "a target is no draft for itself"
    assert by_model[near.name].guess.alpha > by_model[far.name].guess.alpha > by_model[other.name].guess.alpha
    assert by_model[heavy.name].guess.alpha > by_model[near.name].guess.alpha, "a larger draft knows more,"
    assert by_model[heavy.name].forecast.speedup < by_model[near.name].forecast.speedup, "but takes longer"
    assert "translated" in by_model[other.name].guess.why and by_model[near.name].ratio == 10**8 / (8 * 10**9)
    assert "drafts have to be smaller" in found.rejections[0].reasons[0]


def test_who_takes_a_pair_and_who_does_not() -> None:
    """Mistral with Llama's draft: Headstart translates, the others name the tokens that differ."""
    target, other = (
        facts("Mistral-7B", form="gguf", config={}),
        small("Llama-3.2-1B", OTHER_WORDS, form="gguf", config={}),
    )
    told = relate(vocabulary(), vocabulary(OTHER_WORDS)).told()
    own = pairs.rank(target, [model(other)], CPU).candidates[0]
    assert "headstart" in own.engines and "llamacpp" not in own.engines
    assert "token 10 is 'word5' in one and 'zebra' in the other" in dict(own.objections)["llamacpp"]
    refused = pairs.rank(target, [model(other)], CPU, ["llamacpp"]).rejections[0]
    assert refused.name == other.name and told in refused.reasons and "10 is 'word5' here and 'zebra' there" in told
    same = pairs.rank(target, [model(small("d", form="gguf", config={}))], CPU, ["llamacpp"])
    assert same.candidates[0].engines == ("headstart", "llamacpp") and not same.rejections


def test_a_model_that_cannot_be_judged_is_refused() -> None:
    broken = stores.Model(stores.Found("b", stores.FOLDER, Path("b")), None, "it is broken.")
    odd = small("odd", head=True, config={"speculators_model_type": "eagle3"})
    found = pairs.rank(facts(), [broken, model(odd)], CPU)
    assert not found.candidates and [r.name for r in found.rejections] == ["b", "odd"]
    assert found.rejections[0].reasons == ("it is broken.",) and found.rejections[1].reasons[0]


def test_a_head_made_for_the_target_and_one_made_for_another() -> None:
    head = look(str(head_of("smollm2", "eagle3")))
    size = {"hidden": 576, "layers": 30, "vocab_size": 49152, "parameters": 135 * 10**6, "weight_bytes": 270 * 10**6}
    own = pairs.rank(facts("SmolLM2-135M-Instruct", **size), [model(head)], CPU).candidates[0]
    other = pairs.rank(facts("Another-135M", **size), [model(head)], CPU).candidates[0]
    assert own.kind == "eagle3" and own.guess.why == "eagle3, made for this target"
    assert other.guess.alpha < own.guess.alpha and "made for HuggingFaceTB/SmolLM2" in other.guess.why
    wrong = pairs.rank(facts("SmolLM2-360M-Instruct", **size | {"hidden": 960}), [model(head)], CPU)
    assert "hidden size of 576" in wrong.rejections[0].reasons[0]


def test_a_head_reads_what_it_shares_and_not_its_embeddings() -> None:
    head = look(str(head_of("smollm2", "eagle3")))
    target = facts(hidden=576, vocab_size=49152)
    lent = 2 * head.config["draft_vocab_size"] * 576 if head.config.get("lm_head_of_target") else 0
    assert pairs.head_bytes(target, head, "eagle3") <= head.weight_bytes + lent
    assert pairs.head_bytes(target, head, "mtp") >= pairs.head_bytes(target, head, "eagle3")


def test_the_layer_that_a_model_brings_along(tmp_path) -> None:
    """An MTP layer in the target's own folder is a head; where the loader does not know it, it is refused."""
    from tests import test_heads as heads

    tensors = {"model.embed_tokens.weight": heads.EMBEDDING, "lm_head.weight": heads.LM_HEAD}
    heads.write(tmp_path, heads.MTP, heads.mtp_tensors() | tensors)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    name = f"{tmp_path} (its MTP layer)"
    found = pairs.rank(look(str(tmp_path)), [], CPU)
    assert [(c.draft.name, c.kind) for c in found.candidates] == [(name, "mtp")] and not found.rejections
    assert found.candidates[0].draft.weight_bytes < look(str(tmp_path)).weight_bytes
    strange = pretend(tmp_path / "m", SMALL | {"num_hidden_layers": 5})
    (strange / "config.json").write_text(json.dumps(SMALL | {"num_nextn_predict_layers": 1}))
    assert [r.name for r in pairs.rank(look(str(strange)), [], CPU).rejections] == [f"{strange} (its MTP layer)"]
    assert not pairs.rank(look(str(pretend(strange, SMALL))), [], CPU).rejections


def test_vocabularies_that_cannot_be_compared_are_less_sure() -> None:
    guess = pairs.guess_draft(facts(), small(texts=None), None)
    assert guess.spread > pairs.SPREAD and "cannot be compared" in guess.why


@given(st.floats(1e-6, 0.6))
def test_guesses_are_chances_and_grow_with_the_draft(share: float) -> None:
    target, same = facts(parameters=10**10), relate(vocabulary(), vocabulary())
    one = pairs.guess_draft(target, small(parameters=int(share * 10**10)), same)
    two = pairs.guess_draft(target, small(parameters=int(1.2 * share * 10**10)), same)
    assert 0 < one.low <= one.alpha <= two.alpha <= two.high < 1


# ------------------------------------------------------------------ families
def test_the_table_is_in_order() -> None:
    ids = list(families.every_id())
    assert len(ids) == len(set(ids)) and all(id.count("/") == 1 and " " not in id for id in ids)
    for family in families.FAMILIES:
        assert family.drafts or family.note, f"{family.name} says nothing"
        for known in family.drafts:
            assert known.kind == families.DRAFT_MODEL or known.kind in pairs.HEADS
            assert 0 < known.billions < 20
            if not known.head and "starcoder" not in known.id:
                own = families.family_of(known.id)
                assert own is family, f"{known.id} is in {family.name}, and its name says {own}"


@pytest.mark.parametrize(
    ("name", "family", "first"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama 3", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama 3", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"),
        ("ollama:llama3.1:8b", "Llama 3", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"),
        ("/x/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "Llama 3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "Llama 3", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
        ("ollama:deepseek-r1:32b", "DeepSeek R1 on Qwen", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
        ("deepseek-ai/DeepSeek-V3.1", "DeepSeek V3", "lmsys/DeepSeek-V3-NextN"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen2.5-Coder", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        ("Qwen/Qwen2.5-72B-Instruct", "Qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen3-8B", "Qwen3", "AngelSlim/Qwen3-8B_eagle3"),
        ("ollama:qwen3:32b", "Qwen3", "RedHatAI/Qwen3-32B-speculator.eagle3"),
        ("google/gemma-3-27b-it", "Gemma 3", "google/gemma-3-270m-it"),
        ("openai/gpt-oss-20b", "gpt-oss", "RedHatAI/gpt-oss-20b-speculator.eagle3"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "Mistral Small 3", "alamios/Mistral-Small-3.1-DRAFT-0.5B"),
        ("mistralai/Mistral-Large-Instruct-2411", "Mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "SmolLM2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("zai-org/GLM-4.5-Air", "GLM 4.5", None),
        ("microsoft/phi-4", "Phi 4", None),
        ("somebody/something", None, None),
    ],
)
def test_targets_and_what_is_well_known_for_them(name, family, first) -> None:
    found = families.family_of(name)
    assert (found.name if found else None) == family
    known = [one.id for one in families.well_known(name)]
    assert (first in known[:4]) if first else not known


def test_no_draft_is_as_large_as_its_target() -> None:
    assert [k.id for k in families.well_known("meta-llama/Llama-3.2-3B-Instruct")] == [
        "meta-llama/Llama-3.2-1B-Instruct"
    ]
    assert families.well_known("meta-llama/Llama-3.2-1B-Instruct") == []


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama-3.3-70B", 70), ("Qwen3-235B-A22B", 235), ("Mixtral-8x7B-Instruct", 56), ("SmolLM2-135M", 0.135),
     ("Qwen2.5-1.5B-Instruct", 1.5), ("ollama:llama3.1:8b", 8), ("gpt-oss-20b", 20), ("phi-4", None), ("phi-3-mini-4k", None)],
)  # fmt: skip
def test_sizes_in_names(name, billions) -> None:
    assert families.billions_of(name) == billions
    stand_in = families.stand_in(name)
    assert (stand_in.parameters if stand_in else None) == (round(billions * 1e9) if billions else None)


# ------------------------------------------------------------------ the command
def test_a_target_with_drafts_of_every_store(empty, tmp_path) -> None:
    target = folder(tmp_path / "m" / "Llama-3.1-8B", LLAMA_8B)
    folder(tmp_path / "m" / "Llama-3.2-tiny")
    folder(tmp_path / "m" / "zebra", words=OTHER_WORDS)
    in_cache(empty, "owner/cached")
    in_ollama(empty)
    done = run("--target", str(target), str(tmp_path / "m"), "--json")
    told = json.loads(done.stdout)
    (ranking,) = told["rankings"]
    drafts = [c["name"] for c in ranking["candidates"]]
    assert done.exit_code == 0 and ranking["family"] == "Llama 3" and ranking["on_disk"]
    assert {"owner/cached", "ollama:small:1b", str(tmp_path / "m" / "zebra")} <= set(drafts)
    first = next(c for c in ranking["candidates"] if c["name"].endswith("Llama-3.2-tiny"))
    assert first["acceptance"]["why"] == "the same family and vocabulary" and 1 <= first["forecast"]["gamma"] <= 8
    assert first["forecast"]["low"] < first["forecast"]["speedup"] < first["forecast"]["high"]
    speeds = [c["forecast"]["speedup"] for c in ranking["candidates"]]
    assert speeds == sorted(speeds, reverse=True)
    assert any("hidden size" in r["reasons"][0] for r in ranking["rejections"]), "the head that comes along"
    assert {m["name"] for m in told["models"]} >= set(drafts) and told["hardware"]["here"]
    text = run("--target", str(target), str(tmp_path / "m")).output
    assert "10 is 'word5' here and 'zebra' there" in text and "Not in vLLM, llama.cpp, TabbyAPI" in text
    assert "Well known, and not here: " in text and "Predicted for CPU (10 GB/s, measured)" in text


def test_rejections_of_a_target_tell_the_tokens(tmp_path) -> None:
    one, two = write_gguf(tmp_path / "big.gguf"), write_gguf(tmp_path / "other.gguf", OTHER_WORDS)
    big = write_gguf(tmp_path / "huge.gguf", [*WORDS, *(f"more{i}" for i in range(100))])
    done = run("--target", str(big), str(tmp_path), "--for", "llamacpp")
    assert str(one) in done.output and done.exit_code == 0
    assert f"✗ {two}: llama.cpp refuses the pair: token 10 is 'word5' in one and 'zebra' in the other." in done.output
    assert "1 ids stand for different tokens (10 is 'word5' here and 'zebra' there)" in done.output


def test_gguf_files_of_a_repository(empty) -> None:
    """By its id where it has one file; else one has to be named."""
    for name in ("a.gguf", "b.gguf"):
        path = empty / "hub" / "models--Qwen--Qwen3-8B-GGUF" / "snapshots" / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(path)
        done = run("--target", "Qwen/Qwen3-8B-GGUF")
        assert ("Qwen3-8B-GGUF/snapshots/1/a.gguf: llama" in done.output) == (name == "a.gguf")
        assert done.exit_code == (1 if name == "a.gguf" else 2)
    assert "has 2 files here: name one of them" in done.stderr


def test_weights_that_the_gpu_cannot_run() -> None:
    target = facts("m", quantized="awq")
    old, new = (pairs.rank(target, [model(small())], by_name(gpu)).candidates[0] for gpu in ("V100", "A100"))
    assert "vllm" in new.engines and "vllm" not in old.engines and "7.5" in dict(old.objections)["vllm"]


def test_every_model_that_has_a_draft(tmp_path) -> None:
    folder(tmp_path / "m" / "large", LLAMA2_7B)
    folder(tmp_path / "m" / "small")
    done = run(str(tmp_path / "m"))
    assert done.exit_code == 0 and f"{tmp_path / 'm' / 'large'}: LlamaForCausalLM" in done.output
    assert f"\n{tmp_path / 'm' / 'small'}: " not in done.output, "it has none"
    assert "more do not fit: headstart pairs --target" in done.output
    told = json.loads(run(str(tmp_path / "m"), "--json", "--quiet").stdout)
    assert [len(r["candidates"]) for r in told["rankings"]] == [1]


def test_a_target_that_is_not_here() -> None:
    done = run("--target", "Qwen/Qwen3-32B", "--gpu", "H100")
    assert done.exit_code == 1 and "not on this disk; a model of the family Qwen3" in done.output
    assert "Fetch one: hf download " in done.output and "then: headstart check Qwen/Qwen3-32B " in done.output
    assert "Predicted for H100 (" in done.output
    told = json.loads(run("--target", "Qwen/Qwen3-32B", "--json").stdout)["rankings"][0]
    assert not told["on_disk"] and told["well_known"][0]["forecast"]["speedup"] > 1 and told["candidates"] == []
    done = run("--target", "zai-org/GLM-4.5")
    assert done.exit_code == 1 and "MTP layer of its own" in done.output


def test_a_target_without_a_draft_is_told_what_is_well_known(empty, tmp_path) -> None:
    target = folder(tmp_path / "SmolLM2-1.7B", LLAMA_8B)
    done = run("--target", str(target))
    assert done.exit_code == 1 and "Nothing here drafts for it. Well known:" in done.output
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in done.output and "built-in model smollm2" in done.output
    unknown = folder(tmp_path / "something", LLAMA_8B)
    done = run("--target", str(unknown))
    assert done.exit_code == 1 and "no draft is well known" in done.output
    in_cache(empty, "HuggingFaceTB/SmolLM2-135M-Instruct", SMALL | {"architectures": ["BertModel"]})
    told = json.loads(run("--target", "HuggingFaceTB/SmolLM2-1.7B", "--json").stdout)["rankings"][0]
    assert [k["on_disk"] for k in told["well_known"] if k["name"].endswith("135M-Instruct")] == [True]


def test_an_empty_disk_is_told_the_families() -> None:
    done = run()
    assert done.exit_code == 0 and "There are no models on this disk" in done.output and "gpt-oss" in done.output


def test_a_target_of_which_only_the_config_was_fetched(empty) -> None:
    snapshot = in_cache(empty, "Qwen/Qwen3-8B")
    (snapshot / "model.safetensors").unlink()
    done = run("--target", "Qwen/Qwen3-8B")
    assert done.exit_code == 1 and "Well known:" in done.output


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--target", "nonsense"], "no model 'nonsense'"),
        (["--target", "owner/never-heard-of"], "Nor is its family known"),
        (["--for", "vlm"], "--for vlm is not an engine"),
        (["--gpu", "toaster"], "--gpu toaster is not known here"),
        (["/no/such/folder"], "is no folder and no GGUF file"),
        (["--target", str(head_of("smollm2", "eagle3"))], "is a head, and no model by itself"),
    ],
)
def test_mistakes_are_said_in_one_sentence(more, why) -> None:
    done = run(*more)
    assert done.exit_code == 2 and why in done.stderr and "Traceback" not in done.stderr


def test_a_broken_target_is_a_mistake(tmp_path) -> None:
    path = folder(tmp_path / "odd") / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    done = run("--target", str(path.parent))
    assert done.exit_code == 2 and "cannot be paired" in done.stderr and "truncated" in done.stderr
