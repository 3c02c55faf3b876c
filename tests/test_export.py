"""Exports: every engine with every method says it in that engine's own words, or says that it cannot."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headstart.advise.decision import Decision
from headstart.advise.export import ENGINES, export, keep
from headstart.advise.export.order import Order
from headstart.advise.export.wish import Exported, Serving, Setting, Wish, steps
from headstart.advise.export.words import flags, line, safe_name, script
from headstart.advise.export.words import yaml as to_yaml
from headstart.cli import app
from headstart.config import OWN_OPTIONS, parse_speculative
from headstart.errors import BadInput
from tests import tiny
from tests.test_advise import LLAMA_8B, LLAMA_70B, pretend
from tests.test_check import write_gguf

TARGET, DRAFT, HEAD = "some-org/large", "some-org/small", "some-org/head"  # on no machine
SERVING = Serving("0.0.0.0", 9000, 8192, 16, "bfloat16", 0.8, 4, 1)
SCHEDULE = ((1, 4, 5), (5, 16, 2), (17, 256, 0))
METHODS = [method for method in OWN_OPTIONS if method != "none"]
LLAMACPP_SPECULATIVE = {  # of tools/server/README.md, mid-2026
    "--spec-type", "--spec-default", "--spec-draft-model", "--spec-draft-hf", "--spec-draft-n-max", "--spec-draft-n-min",
    "--spec-draft-p-split", "--spec-draft-p-min", "--spec-draft-ngl", "--spec-draft-device",
    "--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m", "--spec-ngram-simple-min-hits",
}  # fmt: skip
LLAMACPP_OTHER = {
    "--model", "--hf-repo", "--host", "--port", "--parallel", "--ctx-size", "--split-mode", "--tensor-split", "--metrics",
}  # fmt: skip
LLAMACPP_TYPES = {"draft-simple", "draft-eagle3", "draft-mtp", "ngram-simple"}
SGLANG = {
    "--model-path", "--host", "--port", "--context-length", "--max-running-requests", "--dtype", "--mem-fraction-static",
    "--tp-size", "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps",
    "--speculative-eagle-topk", "--speculative-num-draft-tokens", "--speculative-use-rejection-sampling",
    "--speculative-adaptive", "--speculative-adaptive-config", "--speculative-ngram-max-bfs-breadth",
    "--disable-overlap-schedule",
}  # fmt: skip
VLLM_KEYS = {
    "method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "max_model_len", "prompt_lookup_max",
    "prompt_lookup_min", "parallel_drafting", "num_speculative_tokens_per_batch_size", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
    "rejection_sample_method", "draft_sample_method", "use_heterogeneous_vocab", "enforce_eager", "attention_backend",
}  # fmt: skip
TABBY: dict[str, dict[str, Any]] = {  # sections of its config.yml, and the types of their values
    "network": {"host": str, "port": int},
    "model": {
        "model_dir": str, "model_name": str, "max_seq_len": int, "cache_size": int, "max_batch_size": int,
        "tensor_parallel": bool,
    },
    "draft_model": {
        "draft_mode": str, "draft_model_dir": str, "draft_model_name": str, "draft_num_tokens": int, "dynamic_draft": bool,
        "ngram_match_min": int,
    },
}  # fmt: skip
TABBY_MODES = ("model", "disabled", "mtp", "ngram")
TRTLLM: dict[str, Any] = {  # fields of its LLM API
    "max_seq_len": int, "max_batch_size": int, "dtype": str, "tensor_parallel_size": int, "kv_cache_config": dict,
    "speculative_config": dict, "disable_overlap_scheduler": bool,
}  # fmt: skip
TRTLLM_SPECULATIVE: dict[str, Any] = {
    "decoding_type": str, "max_draft_len": int, "num_nextn_predict_layers": int, "speculative_model": str,
    "speculative_model_dir": str, "max_matching_ngram_size": int, "use_dynamic_tree": bool, "dynamic_tree_max_topK": int,
    "max_total_draft_tokens": int, "draft_len_schedule": dict, "use_rejection_sampling": bool,
}  # fmt: skip
TRTLLM_TYPES = {"NGram", "SA", "Draft_Target", "Eagle3", "MTP"}


# ------------------------------------------------------------------ help
def order(method: str | None = None, **more: Any) -> Order:
    """With what the method needs."""
    if method is None:
        return Order(TARGET, **more)
    draft = DRAFT if method == "draft_model" else None
    head = HEAD if method in ("eagle3", "peagle", "eagle", "medusa", "mlp_speculator", "mtp") else None
    return Order(TARGET, draft, head, method, **more)


def tuned(path: Path, speculative: dict[str, Any], **reasons: str) -> Path:
    Decision(TARGET, speculative, reasons).write(path)
    return path


def text_of(found: Exported, ending: str = "") -> str:
    return next(text for name, text in found.files if name.endswith(ending))


def words(found: Exported) -> list[str]:
    """What a shell makes of the script: the words of the one command in it."""
    out = subprocess.run(
        ["sh", "-c", 'run() { printf "%s\\0" "$@"; }\n' + _renamed(text_of(found, ".sh"))],
        capture_output=True,
        check=True,
    )
    return out.stdout.decode().split("\0")[:-1]


def _renamed(text: str) -> str:
    lines = text.split("\n")
    at = next(i for i, one in enumerate(lines) if not one.startswith("#"))
    return "\n".join([*lines[:at], "run " + lines[at], *lines[at + 1 :]])


def value(found: Exported, flag: str) -> str:
    return found.command[found.command.index(flag) + 1]


def vllm_config(found: Exported) -> dict[str, Any]:
    return json.loads(value(found, "--speculative-config"))


def headstart(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["export", *args])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def told(error: pytest.ExceptionInfo[BadInput]) -> str:
    text = str(error.value)
    assert "\n" not in text and text.rstrip().endswith((".", "?"))
    return text


# ------------------------------------------------------------------ every engine with every method
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_expressed_or_said(engine: str, method: str) -> None:
    wanted = order(method, serving=SERVING)
    if method in ENGINES[engine].methods:
        found = export(engine, wanted)
        assert ENGINES[engine].methods[method] in "".join(text for _, text in found.files)
    else:
        with pytest.raises(
            BadInput, match=f"{ENGINES[engine].title} will not run this .*has no method '{method}'"
        ) as error:
            export(engine, wanted)
        assert all(name in told(error) for name in ENGINES[engine].methods)
        found = export(engine, wanted, force=True)
        assert any("exported without speculation" in note for note in found.notes)
    for note in found.notes:
        assert "\n" not in note and any(line(note) in text for _, text in found.files), "notes stand in the file too"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_asked_of_the_server_is_said_or_noted(engine: str) -> None:
    found = export(engine, order("mtp" if engine == "ollama" else "ngram", serving=SERVING))
    everything = " ".join([*(text for _, text in found.files), *found.command])
    for name in ("host", "port", "max_model_len", "max_num_seqs", "dtype", "gpu_memory_utilization"):
        noted = any(f"no word for {name}=" in note for note in found.notes)
        assert noted or str(getattr(SERVING, name)) in everything, name
    for name in ("tensor_parallel_size", "draft_tensor_parallel_size"):
        assert name in ENGINES[engine].says or any(f"no word for {name}=" in note for note in found.notes)


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_decoding(engine: str) -> None:
    found = export(engine, order())
    assert not any("spec" in name for name in found.command)
    assert any("Without speculation: no --draft" in note for note in found.notes)


@pytest.mark.parametrize("engine", ENGINES)
def test_tuned_plain_decoding_keeps_its_reason(engine: str, tmp_path: Path) -> None:
    Decision(TARGET, {}, {"method": "nothing that drafts pays here"}).write(tmp_path / "t.json")
    found = export(engine, Order(tuned=tmp_path / "t.json"))
    assert any("nothing that drafts pays here" in note for note in found.notes)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_schedules_and_trees_are_expressed_or_said(engine: str, method: str, tmp_path: Path) -> None:
    if method not in ENGINES[engine].methods:
        return
    spoken = {"method": method, "model": HEAD, "num_speculative_tokens_per_batch_size": [list(row) for row in SCHEDULE]}
    if method in ("ngram", "suffix"):
        del spoken["model"]
    for more in ({}, {"tree": True, "policy": "adaptive", "verification": "rejection", "top_k": 3}):
        found = export(engine, Order(tuned=tuned(tmp_path / "t.json", spoken | more)))
        everything = "".join(text for name, text in found.files)
        words_for = ("per_batch_size", "adaptive.json", "draft_len_schedule")
        noted = any("batch_size_schedule" in note for note in found.notes)
        assert noted or any(word in everything for word in words_for)
        if more:
            trees = ("eagle-topk 3", "use_dynamic_tree")
            assert any("tree" in note or "branch" in note for note in found.notes) or any(
                w in everything for w in trees
            )


# ------------------------------------------------------------------ vLLM
@pytest.mark.parametrize("method", [m for m in METHODS if m in ENGINES["vllm"].methods])
def test_vllm_s_json_is_what_headstart_reads(method: str) -> None:
    found = export("vllm", order(method, tokens=4, serving=SERVING))
    told = vllm_config(found)
    assert set(told) <= VLLM_KEYS
    config, _ = parse_speculative(told)
    assert (config.method, config.num_speculative_tokens) == (method, 4)
    assert config.model == (None if method in ("ngram", "suffix") else DRAFT if method == "draft_model" else HEAD)
    assert told["draft_tensor_parallel_size"] == 1 and value(found, "--tensor-parallel-size") == "4"
    assert words(found) == list(found.command), "the script is the command"


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(5, 9),
    st.sampled_from(["rejection", "walk"]),
)
def test_vllm_s_json_is_the_config_that_was_tuned(rows: Any, short: int, long: int, verification: str) -> None:
    from tempfile import TemporaryDirectory

    table = [[a, a + b, k] for a, b, k in rows]
    spoken = {
        "method": "ngram", "num_speculative_tokens": 9, "prompt_lookup_min": short, "prompt_lookup_max": long,
        "batch_size_schedule": table, "verification": verification,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        found = export("vllm", Order(tuned=tuned(Path(folder) / "t.json", spoken)))
    config = parse_speculative(vllm_config(found))[0]
    assert config.batch_size_schedule == tuple(steps([(a, b, k) for a, b, k in table], 9)), "from 1 on, no row twice"
    ours = parse_speculative(spoken)[0]
    assert replace(config, batch_size_schedule=(), verification=verification) == replace(ours, batch_size_schedule=())
    assert config.verification == ("rejection" if verification == "rejection" else "walk")


def test_vllm_has_p_eagle_as_a_switch_of_eagle3() -> None:
    told = vllm_config(export("vllm", order("peagle")))
    assert told["method"] == "eagle3" and told["parallel_drafting"] is True


def test_vllm_splits_a_draft_like_the_target_or_not_at_all() -> None:
    with pytest.raises(BadInput, match="over 1 device, or over all 4 of the target"):
        export("vllm", order("draft_model", serving=replace(SERVING, draft_tensor_parallel_size=2)))
    assert vllm_config(export("vllm", order("ngram", serving=replace(SERVING, draft_tensor_parallel_size=4))))


def test_keys_of_vllm_alone_are_passed_on_to_it_and_noted_elsewhere(tmp_path: Path) -> None:
    spoken = {"method": "ngram", "enforce_eager": True, "draft_tensor_parallel_size": 1}
    file = tuned(tmp_path / "t.json", spoken)
    told = vllm_config(export("vllm", Order(tuned=file)))
    assert told["enforce_eager"] is True and told["draft_tensor_parallel_size"] == 1
    notes = export("llamacpp", Order(tuned=file)).notes
    assert any("no word for enforce_eager=True" in note for note in notes)
    assert any("no word for draft_tensor_parallel_size=1" in note for note in notes)


@pytest.mark.skipif(not os.environ.get("HEADSTART_VLLM"), reason="HEADSTART_VLLM names no environment with vLLM")
def test_vllm_s_own_parser_takes_it() -> None:
    code = (
        "import sys, json\n"
        "from dataclasses import fields\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "from vllm.config.speculative import SpeculativeConfig\n"
        "known = {field.name for field in fields(SpeculativeConfig)}\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(['--model', *words])\n"
        "    assert args.tensor_parallel_size == 4 and args.max_num_seqs == 16 and args.max_model_len == 8192\n"
        "    assert set(args.speculative_config) <= known, set(args.speculative_config) - known\n"
    )
    engine = replace(SERVING, host=None, port=None)  # which the server itself reads
    every = [export("vllm", order(m, serving=engine)).command[2:] for m in METHODS if m in ENGINES["vllm"].methods]
    python = Path(os.environ["HEADSTART_VLLM"]) / "bin" / "python"
    done = subprocess.run([str(python), "-c", code, json.dumps(every)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ Triton
def model_config() -> Any:
    """The published schema. Triton's client has it; its package would want gRPC, its generated module does not."""
    package = importlib.util.find_spec("tritonclient")
    assert package is not None and package.submodule_search_locations
    return _module(Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py").ModelConfig()


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("method", [None, *(m for m in METHODS if m in ENGINES["triton"].methods)])
def test_triton_s_repository(method: str | None) -> None:
    found = export("triton", order(method, serving=SERVING))
    assert [name for name, _ in found.files] == ["large/config.pbtxt", "large/1/model.json"]
    config = text_format.Parse(text_of(found, ".pbtxt"), model_config())
    assert config.backend == "vllm" and config.model_transaction_policy.decoupled and config.max_batch_size == 0
    assert [(group.count, group.Kind.Name(group.kind)) for group in config.instance_group] == [(1, "KIND_MODEL")]
    told = json.loads(text_of(found, ".json"))
    assert (told["model"], told["tensor_parallel_size"], told["max_num_seqs"]) == (TARGET, 4, 16)
    assert told["gpu_memory_utilization"] == 0.8 and told["dtype"] == "bfloat16" and told["max_model_len"] == 8192
    same = vllm_config(export("vllm", order(method, serving=SERVING))) if method else None
    assert told.get("speculative_config") == same
    assert found.command == tuple(
        shlex.split("tritonserver --model-repository . --http-address 0.0.0.0 --http-port 9000")
    )


@pytest.mark.parametrize("name", ["../../nowhere/../x", "a b/c:d e", "nowhere/..", "x" * 10 + "\n/y\n"])
def test_a_repository_stays_in_its_folder(name: str) -> None:
    for file, _ in export("triton", Order(name, method="ngram")).files:
        assert ".." not in Path(file).parts and "\n" not in file and " " not in file
    assert safe_name("..") == "model"


# ------------------------------------------------------------------ llama.cpp
@pytest.mark.parametrize("method", [None, *(m for m in METHODS if m in ENGINES["llamacpp"].methods)])
def test_llamacpp_s_flags_are_its_own(method: str | None) -> None:
    found = export("llamacpp", order(method, serving=SERVING))
    used = {word for word in found.command if word.startswith("--")}
    assert used <= LLAMACPP_SPECULATIVE | LLAMACPP_OTHER
    assert words(found) == list(found.command)
    assert value(found, "--ctx-size") == str(8192 * 16) and value(found, "--parallel") == "16"
    assert (value(found, "--split-mode"), value(found, "--tensor-split")) == ("row", "1,1,1,1")
    if method:
        assert value(found, "--spec-type") in LLAMACPP_TYPES
        length = "--spec-ngram-simple-size-m" if method == "ngram" else "--spec-draft-n-max"
        assert value(found, length) == "3"


def test_llamacpp_s_n_grams(tmp_path: Path) -> None:
    found = export("llamacpp", order("ngram"))
    assert value(found, "--spec-ngram-simple-size-n") == "3" and not any(
        "prompt_lookup" in note for note in found.notes
    )
    told = vllm_config(export("vllm", order("ngram")))
    assert (told["prompt_lookup_min"], told["prompt_lookup_max"]) == (2, 5), "vLLM's own numbers are others"
    file = tuned(tmp_path / "t.json", {"method": "ngram", "prompt_lookup_max": 7, "p_min": 0.5})
    found = export("llamacpp", Order(tuned=file))
    assert value(found, "--spec-ngram-simple-size-n") == "7"
    assert any("no word for p_min with n-grams" in note for note in found.notes)


def test_llamacpp_s_bounds_of_drafts(tmp_path: Path) -> None:
    spoken = {"model": "d.gguf", "p_min": 0.6, "n_min": 2, "n_max": 8, "top_k": 4}
    found = export("llamacpp", Order("t.gguf", tuned=tuned(tmp_path / "t.json", spoken, n_max="8 was best")))
    assert value(found, "--spec-draft-p-min") == "0.6" and value(found, "--spec-draft-n-min") == "2"
    assert value(found, "--spec-draft-n-max") == "8" and "# --spec-draft-n-max 8: 8 was best" in text_of(found)
    assert value(found, "--model") == "t.gguf" and value(found, "--spec-draft-model") == "d.gguf"
    assert any("no word for top_k=4" in note for note in found.notes)
    assert any("was tuned for" in note for note in found.notes)


# ------------------------------------------------------------------ TabbyAPI
@pytest.mark.parametrize("method", [None, *(m for m in METHODS if m in ENGINES["tabbyapi"].methods)])
def test_tabbyapi_s_sections(method: str | None) -> None:
    found = export("tabbyapi", order(method, serving=SERVING))
    told = yaml.safe_load(text_of(found, "config.yml"))
    for section, values in told.items():
        for name, one in values.items():
            assert type(one) is TABBY[section][name], f"{section}.{name}"
    assert told["draft_model"]["draft_mode"] in TABBY_MODES
    assert told["model"]["cache_size"] % 256 == 0 and told["model"]["cache_size"] >= 8192 * 16
    assert told["model"]["model_name"] == "large" and told["model"]["tensor_parallel"] is True
    if method == "draft_model":
        assert told["draft_model"]["draft_model_name"] == "small"


def test_tabbyapi_adapts_where_that_was_tuned(tmp_path: Path) -> None:
    file = tuned(tmp_path / "t.json", {"method": "ngram", "policy": "adaptive", "n_max": 6}, policy="it pays")
    told = yaml.safe_load(text_of(export("tabbyapi", Order(tuned=file))))["draft_model"]
    assert told == {"draft_mode": "ngram", "draft_num_tokens": 6, "dynamic_draft": True, "ngram_match_min": 2}
    assert "# it pays\n  dynamic_draft: true" in text_of(export("tabbyapi", Order(tuned=file)))


@pytest.mark.skipif(not os.environ.get("HEADSTART_TABBYAPI"), reason="HEADSTART_TABBYAPI names no checkout")
@pytest.mark.parametrize("method", [None, *(m for m in METHODS if m in ENGINES["tabbyapi"].methods)])
def test_tabbyapi_s_own_models_take_it(method: str | None) -> None:
    models = _module(Path(os.environ["HEADSTART_TABBYAPI"]) / "common" / "config_models.py")
    told = yaml.safe_load(text_of(export("tabbyapi", order(method, serving=SERVING)), "config.yml"))
    read = models.TabbyConfigModel.model_validate(told)
    for section, values in told.items():
        own = getattr(read, section)
        assert set(values) <= set(type(own).model_fields), "a key that is not known would be passed over"
        assert {name: getattr(own, name) for name in values} == values


# ------------------------------------------------------------------ SGLang
@pytest.mark.parametrize("method", [None, *(m for m in METHODS if m in ENGINES["sglang"].methods)])
def test_sglang_s_flags_are_its_own(method: str | None) -> None:
    found = export("sglang", order(method, tokens=4, serving=SERVING) if method else order(serving=SERVING))
    assert {word for word in found.command if word.startswith("--")} <= SGLANG
    assert words(found) == list(found.command)
    if method:
        assert value(found, "--speculative-num-draft-tokens") == "5", "the token that a chain follows counts there"
    if method and method not in ("ngram", "suffix"):
        assert (value(found, "--speculative-num-steps"), value(found, "--speculative-eagle-topk")) == ("4", "1")


def test_sglang_s_trees() -> None:
    found = export("sglang", order("eagle3", tokens=4, tree=True))
    assert (value(found, "--speculative-eagle-topk"), value(found, "--speculative-num-draft-tokens")) == ("4", "17")
    assert "--disable-overlap-schedule" in found.command


def test_sglang_s_schedule_is_a_file_by_smallest_batch(tmp_path: Path) -> None:
    spoken = {"method": "eagle3", "model": HEAD, "batch_size_schedule": [list(row) for row in SCHEDULE]}
    found = export("sglang", Order(tuned=tuned(tmp_path / "t.json", spoken), folder="here"))
    assert (
        value(found, "--speculative-adaptive-config") == "here/adaptive.json"
        and "--speculative-adaptive" in found.command
    )
    assert json.loads(text_of(found, ".json")) == {
        "1": {"candidate_steps": [5]}, "5": {"candidate_steps": [2]}, "17": {"candidate_steps": [0]},
    }  # fmt: skip
    assert value(found, "--speculative-num-steps") == "5", "it has to be one of the candidates"
    assert "adaptive" not in " ".join(
        export("sglang", Order(tuned=tuned(tmp_path / "u.json", spoken | {"method": "draft_model"}))).command
    )


# ------------------------------------------------------------------ TensorRT-LLM
@pytest.mark.parametrize("version", [None, (0, 21), (1, 0), (1, 1, 3), (1, 2)])
@pytest.mark.parametrize("method", [None, *(m for m in METHODS if m in ENGINES["trtllm"].methods)])
def test_trtllm_s_yaml(method: str | None, version: tuple[int, ...] | None) -> None:
    found = export("trtllm", order(method, serving=SERVING, version=version))
    told = yaml.safe_load(text_of(found))
    assert all(type(one) is TRTLLM[name] for name, one in told.items())
    own = told.get("speculative_config", {})
    assert all(type(one) is TRTLLM_SPECULATIVE[name] for name, one in own.items())
    old = version is not None and version < (1, 2)
    assert found.command[2] == ("--extra_llm_api_options" if old else "--config")
    if method:
        earlier = {"eagle3": "Eagle"} if old else {}
        earlier |= {"draft_model": "DraftTarget"} if version == (0, 21) else {}
        assert own["decoding_type"] == earlier.get(method, ENGINES["trtllm"].methods[method])
        assert ENGINES["trtllm"].methods[method] in TRTLLM_TYPES
        assert own.get("max_draft_len", own.get("num_nextn_predict_layers")) in (3, 16)


def test_trtllm_s_schedule_is_by_largest_batch(tmp_path: Path) -> None:
    spoken = {"method": "eagle3", "model": HEAD, "batch_size_schedule": [list(row) for row in SCHEDULE]}
    found = export("trtllm", Order(tuned=tuned(tmp_path / "t.json", spoken)))
    own = yaml.safe_load(text_of(found))["speculative_config"]
    assert own["draft_len_schedule"] == {4: 5, 16: 2} and own["max_draft_len"] == 5
    open_end = tuned(tmp_path / "u.json", spoken | {"batch_size_schedule": [[1, 4, 5], [5, 8, 2]]})
    found = export("trtllm", Order(tuned=open_end))
    assert yaml.safe_load(text_of(found))["speculative_config"]["draft_len_schedule"] == {4: 5, 8: 2}
    assert any("nothing for more than 8 requests" in note for note in found.notes)
    rising = tuned(tmp_path / "v.json", spoken | {"batch_size_schedule": [[1, 4, 0], [5, 8, 5]]})
    found = export("trtllm", Order(tuned=rising))
    own = yaml.safe_load(text_of(found))["speculative_config"]
    assert "draft_len_schedule" not in own and own["max_draft_len"] == 5
    assert any("it is left out" in note for note in found.notes)
    old = export("trtllm", Order(tuned=open_end, version=(1, 1)))
    assert "draft_len_schedule" not in text_of(old) and any("before 1.2 has no word" in note for note in old.notes)


def test_trtllm_s_trees() -> None:
    own = yaml.safe_load(text_of(export("trtllm", order("eagle3", tokens=6, tree=True))))["speculative_config"]
    assert own["use_dynamic_tree"] is True and own["dynamic_tree_max_topK"] == 4
    assert own["max_draft_len"] <= own["max_total_draft_tokens"] <= 4 * own["max_draft_len"]
    assert any("a chain is written" in note for note in export("trtllm", order("draft_model", tree=True)).notes)


# ------------------------------------------------------------------ Ollama
def test_ollama_s_modelfile() -> None:
    text = text_of(export("ollama", Order("ollama:tiny", method="mtp", tokens=2, serving=SERVING)))
    lines = [one for one in text.splitlines() if not one.startswith("#")]
    assert lines == ["FROM tiny", "PARAMETER num_ctx 8192", "PARAMETER draft_num_predict 2"]
    assert "OLLAMA_HOST=0.0.0.0:9000" in text and "OLLAMA_NUM_PARALLEL=16" in text
    text = text_of(export("ollama", Order("a b.gguf", head="mtp.gguf", method="mtp")))
    assert 'FROM "a b.gguf"\n' in text and "DRAFT mtp.gguf\n" in text


# ------------------------------------------------------------------ reasons
@pytest.mark.parametrize("engine", ENGINES)
def test_reasons_of_the_tuner_stand_beside_their_values(engine: str, tmp_path: Path) -> None:
    spoken = {"method": "mtp", "num_speculative_tokens": 7} if engine == "ollama" else {"method": "ngram", "n_max": 7}
    why = {"num_speculative_tokens": "7 of 12 were accepted", "n_max": "7 of 12 were accepted"}
    if engine in ("sglang",):
        spoken = {"method": "mtp", "num_speculative_tokens": 7}
    Decision(TARGET, spoken, why).write(tmp_path / "t.json")
    found = export(engine, Order(tuned=tmp_path / "t.json"))
    assert any("7 of 12 were accepted" in text for _, text in found.files)
    again = export(engine, Order(tuned=tmp_path / "t.json", tokens=4))
    assert not any("7 of 12" in text for _, text in again.files), "another number has another reason"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("evil", ["x\nrm -rf /", "x\r\nFROM evil", "x\u2028y", "'; rm -rf / #", '" #', "$(rm -rf /)"])
def test_nothing_that_was_said_leaves_its_line(engine: str, evil: str, tmp_path: Path) -> None:
    spoken = {"method": "mtp", "model": f"org/{evil}", "num_speculative_tokens": 2}
    Decision(f"org/{evil}", spoken, {"num_speculative_tokens": evil, "method": evil}).write(tmp_path / "t.json")
    found = export(engine, Order(tuned=tmp_path / "t.json"))
    first = text_of(found)
    if engine in ("vllm", "llamacpp", "sglang"):
        assert words(found) == list(found.command)
    elif engine == "triton":
        text_format.Parse(first, model_config())
    elif engine == "ollama":
        lines = [one for one in first.split("\n") if one and not one.startswith("#")]
        assert [one.split()[0] for one in lines] == ["FROM", "DRAFT", "PARAMETER"]
    else:
        read = yaml.safe_load(first)
        assert set(read) <= {*TABBY, *TRTLLM}


PLAIN = st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.recursive(PLAIN, lambda v: st.lists(v) | st.dictionaries(st.integers(), v), max_leaves=5))
def test_yaml_says_what_it_was_given(given_value: Any) -> None:
    assert yaml.safe_load(to_yaml([Setting("key", given_value, "why\nnot")])) == {"key": given_value}


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_script_says_what_it_was_given(text: str) -> None:
    settings = [Setting("a", text, text), Setting("b", True, text)]
    found = Exported((("x.sh", script(("vllm", text), settings, "")),), ("vllm", text, *flags(settings)))
    assert words(found) == list(found.command)


# ------------------------------------------------------------------ schedules
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 10), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_steps_are_the_schedule_without_gaps(rows: Any, most: int) -> None:
    table = [(a, a + b, k) for a, b, k in rows]
    found = steps(table, most)
    assert found[0][0] == 1 and found[-1][1] == max(b for _, b, _ in table)
    assert all(before[1] + 1 == after[0] for before, after in pairwise(found))
    for low, high, tokens in found:
        for size in range(low, high + 1):
            assert tokens == min([most, *(k for a, b, k in table if a <= size <= b)])


# ------------------------------------------------------------------ models on disk
@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("pair")
    return str(tiny.folder(base / "large")), str(tiny.folder(base / "small", seed=1))


def test_models_on_disk_are_checked_and_named_by_their_path(pair: tuple[str, str]) -> None:
    target, draft = pair
    found = export("vllm", Order(target, draft))
    assert found.command[2] == target and vllm_config(found)["model"] == draft
    assert not any("not on this machine" in note for note in found.notes)
    told = yaml.safe_load(text_of(export("tabbyapi", Order(target, draft))))
    assert Path(told["model"]["model_dir"], told["model"]["model_name"]) == Path(target)
    assert Path(told["draft_model"]["draft_model_dir"], told["draft_model"]["draft_model_name"]) == Path(draft)


def test_what_stops_a_pair_is_an_error_or_a_note(pair: tuple[str, str]) -> None:
    target, draft = pair
    with pytest.raises(BadInput, match=r"llama\.cpp will not run this .*is no GGUF file") as error:
        export("llamacpp", Order(target, draft))
    assert told(error)
    assert any("is no GGUF file" in note for note in export("llamacpp", Order(target, draft), force=True).notes)


def test_another_number_of_rows_is_answered_in_vllm(tmp_path: Path) -> None:
    target, draft = (
        pretend(tmp_path / "large", LLAMA_70B, 4),
        pretend(tmp_path / "d", LLAMA_8B | {"vocab_size": 128000}),
    )
    told = vllm_config(export("vllm", Order(str(target), str(draft))))
    assert told["use_heterogeneous_vocab"] is True
    assert parse_speculative(told)[0].method == "draft_model"


def test_other_tokens_stop_engines_that_do_not_translate(tmp_path: Path) -> None:
    target, draft = str(tiny.folder(tmp_path / "t")), str(tiny.folder(tmp_path / "d", size=420))
    for engine in ("sglang", "trtllm"):
        found = export(engine, Order(target, draft), force=True)
        differs = any("stand for other tokens" in note for note in found.notes)
        assert differs == bool(_differing(target, draft))


def _differing(target: str, draft: str) -> int:
    from headstart.advise.facts import look
    from headstart.advise.vocabularies import relate

    ours, theirs = look(target).vocabulary, look(draft).vocabulary
    assert ours is not None and theirs is not None
    return relate(ours, theirs).differing


def test_the_kind_of_a_head_is_read(tmp_path: Path, pair: tuple[str, str]) -> None:
    """Where it cannot be, EAGLE-3 is a guess that is told."""
    found = export("vllm", Order(TARGET, head=HEAD))
    assert vllm_config(found)["method"] == "eagle3" and any("taken for EAGLE-3" in note for note in found.notes)
    with pytest.raises(BadInput, match="will not run this"):
        (tmp_path / "head").mkdir()
        (tmp_path / "head" / "config.json").write_text('{"architectures": ["Nothing"]}')
        export("vllm", Order(pair[0], head=str(tmp_path / "head")))


def test_a_head_and_a_model_are_not_taken_for_each_other(tmp_path: Path, pair: tuple[str, str]) -> None:
    with pytest.raises(BadInput, match="is a model by itself, and no head: name it with --draft"):
        export("vllm", Order(pair[0], head=pair[1], method="eagle3"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="is a head, and no model by itself: name it with --head"):
        export("vllm", Order(pair[0], draft=str(tmp_path)))


def test_the_kind_of_a_real_head_decides_its_method(tmp_path: Path, pair: tuple[str, str]) -> None:
    from transformers import AutoConfig

    from headstart.advise.check import plan_head
    from headstart.advise.facts import look
    from headstart.models.heads.save import save_eagle3

    config = AutoConfig.from_pretrained(pair[0])
    head = str(tmp_path / "head")
    save_eagle3(tiny.eagle(config, (1, 2, 3)), Path(head), pair[0], 5)
    kind = plan_head(look(pair[0]), look(head)).method
    found = export("vllm", Order(pair[0], head=head))
    assert vllm_config(found)["method"] == kind == "eagle3" and not any("taken for" in note for note in found.notes)


def test_gguf_files(tmp_path: Path) -> None:
    target, draft = str(write_gguf(tmp_path / "t.gguf")), str(write_gguf(tmp_path / "d.gguf"))
    found = export("llamacpp", Order(target, draft))
    assert value(found, "--model") == target and value(found, "--spec-draft-model") == draft
    found = export("llamacpp", Order(target, head=draft, method="eagle3"))
    assert value(found, "--spec-type") == "draft-eagle3"
    for engine, why in (
        ("vllm", "GGUF, which vLLM"),
        ("trtllm", "GGUF, which TensorRT-LLM"),
        ("tabbyapi", "TabbyAPI runs"),
    ):
        with pytest.raises(BadInput, match=why):
            export(engine, Order(target, draft))
    assert f"FROM {target}" in text_of(export("ollama", Order(target, method="mtp")))


# ------------------------------------------------------------------ the command line
def test_one_file_goes_through_a_pipe_as_it_is() -> None:
    result = headstart("tabbyapi", "--target", TARGET, "--method", "ngram", "-k", "6", "--port", "9000")
    assert yaml.safe_load(result.stdout)["draft_model"]["draft_num_tokens"] == 6
    assert "Note: " in result.stderr and "not on this machine" in result.stderr
    assert headstart("tabbyapi", "--target", TARGET, "--method", "ngram", "-q").stderr == ""


def test_several_files_have_their_names() -> None:
    out = headstart("triton", "--target", TARGET, "--method", "ngram").stdout
    assert "# ===== large/config.pbtxt\n" in out and "# ===== large/1/model.json\n" in out


def test_json_is_all_parts() -> None:
    result = headstart("vllm", "--target", TARGET, "--draft", DRAFT, "--json")
    told = json.loads(result.stdout)
    assert set(told) == {"engine", "files", "command", "notes"} and told["command"][:3] == ["vllm", "serve", TARGET]
    assert [one["name"] for one in told["files"]] == ["serve.sh"] and len(told["notes"]) == 2


def test_files_are_kept_and_their_own_written_over(tmp_path: Path) -> None:
    out = tmp_path / "repo"
    args = ("triton", "--target", TARGET, "--method", "ngram", "--out", str(out))
    result = headstart(*args)
    assert result.stdout.strip() == f"tritonserver --model-repository {out}"
    assert json.loads((out / "large" / "1" / "model.json").read_text())["model"] == TARGET
    headstart(*args, "-k", "9")
    assert (
        json.loads((out / "large" / "1" / "model.json").read_text())["speculative_config"]["num_speculative_tokens"]
        == 9
    )
    (out / "large" / "1" / "model.json").write_text("{}")
    assert "has been changed since" in headstart(*args, code=2).stderr
    assert (out / "large" / "1" / "model.json").read_text() == "{}"
    headstart(*args, "--force")
    assert json.loads((out / "large" / "1" / "model.json").read_text())["model"] == TARGET


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text("mine")
    args = ("vllm", "--target", TARGET, "--method", "ngram", "--out", str(tmp_path))
    assert "is not a file of headstart export" in headstart(*args, code=2).stderr
    assert (tmp_path / "serve.sh").read_text() == "mine" and not (tmp_path / keep.RECORD).exists()
    (tmp_path / keep.RECORD).write_text("nonsense")
    assert headstart(*args, code=2).stderr
    headstart(*args, "--force")
    assert "vllm serve" in (tmp_path / "serve.sh").read_text()


def test_all_files_are_looked_at_before_one_is_written(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("mine")
    with pytest.raises(BadInput, match="is not a file of"):
        keep.write(tmp_path, [("a", "1"), ("b", "2")])
    assert not (tmp_path / "a").exists()
    (tmp_path / "c").mkdir()
    with pytest.raises(BadInput, match="is a folder"):
        keep.write(tmp_path, [("c", "1")])
    (tmp_path / "same").write_text("1")
    assert keep.write(tmp_path, [("same", "1")]) == [tmp_path / "same"]
    with pytest.raises(BadInput, match="cannot be written"):
        keep.write(tmp_path / "same", [("a", "1")])


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["vlm", "--target", "t"], "Did you mean 'vllm'"),
        (["vllm"], "Name the target"),
        (["vllm", "--target", "t", "--draft", "a", "--head", "b"], "leave one of them out"),
        (["vllm", "--target", "t", "--method", "ngrm"], "Did you mean 'ngram'"),
        (["vllm", "--target", "t", "--method", "ngram", "--draft", "d"], "--draft has no effect with --method ngram"),
        (["vllm", "--target", "t", "--method", "suffix", "--head", "d"], "--head has no effect with --method suffix"),
        (["vllm", "--target", "t", "--method", "eagle3"], "add --head FOLDER"),
        (["vllm", "--target", "t", "--method", "draft_model"], "add --draft MODEL"),
        (["vllm", "--target", "t", "-k", "4"], "no effect without speculation"),
        (["vllm", "--target", "t", "--tree"], "no effect without speculation"),
        (["vllm", "--target", "t", "--method", "ngram", "-k", "0"], "from 1 on"),
        (["vllm", "--target", "t", "--method", "ngram", "-k", "5000"], "0 to 4096"),
        (["vllm", "--target", "t", "--port", "0"], "--port 0 is not usable"),
        (["vllm", "--target", "t", "--gpu-memory-utilization", "1.5"], "is not usable"),
        (["vllm", "--target", "t", "--dtype", "float3"], "expected auto"),
        (["vllm", "--target", "t", "--for-version", "1.0"], "several for trtllm"),
        (["trtllm", "--target", "t", "--for-version", "new"], "is not a version"),
        (["vllm", "--tuned", "nowhere.json"], "cannot be read"),
        (["ollama", "--target", "t", "--draft", "d"], "only mtp"),
    ],
)
def test_a_mistake_is_one_sentence(args: list[str], why: str) -> None:
    result = headstart(*args, code=2)
    assert why in result.stderr and result.stdout == "" and result.stderr.count("\n") == 1


def test_a_tuned_file_and_flags_that_contradict_it(tmp_path: Path) -> None:
    file = tuned(tmp_path / "t.json", {"method": "ngram"})
    for more in ({"draft": "d"}, {"head": "h"}, {"method": "suffix"}):
        with pytest.raises(BadInput, match="is for method 'ngram', and --"):
            export("vllm", Order(tuned=file, **more))
    pair = tuned(tmp_path / "u.json", {"method": "draft_model", "model": "a/b"})
    assert vllm_config(export("vllm", Order(tuned=pair, draft="c/d")))["model"] == "c/d", "a path may differ"
    assert export("vllm", Order(tuned=file, method="ngram"))


def test_no_drafted_tokens_is_plain_decoding(tmp_path: Path) -> None:
    found = export("trtllm", Order(tuned=tuned(tmp_path / "t.json", {"method": "ngram", "n_max": 0})))
    assert "speculative_config" not in text_of(found)


def test_a_static_tree_is_as_deep_as_it_is(tmp_path: Path) -> None:
    spoken = {"method": "eagle3", "model": HEAD, "static_tree": [[0], [1], [0, 0]]}
    found = export("vllm", Order(tuned=tuned(tmp_path / "t.json", spoken)))
    assert vllm_config(found)["num_speculative_tokens"] == 2
    assert any("no word for static_tree" in note for note in found.notes)


def test_a_wish_knows_nothing_of_models_that_are_away() -> None:
    from headstart.advise.export.wish import Model

    assert not Wish(Model("a/b")).another_vocabulary and Model("a/b/").short == "b"
