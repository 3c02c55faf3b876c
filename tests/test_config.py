"""Options: vLLM's and llama.cpp's words are mapped, said or refused, and a slip is answered with the nearest name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from headstart.config import (
    ALIASES,
    LATER,
    METHOD_ALIASES,
    NO_EFFECT,
    OWN_OPTIONS,
    REFUSED,
    TREE_OPTIONS,
    EngineConfig,
    SpeculativeConfig,
    parse_request_speculation,
    parse_speculative,
)
from headstart.core import RequestSpeculation
from headstart.errors import BadInput, ConfigError, HeadstartError, nearest

# key -> a value, and what becomes of it: (our field, our value), "noted" or "refused"
VLLM: dict[str, tuple[Any, Any]] = {
    "method": ("suffix", ("method", "suffix")),
    "model": ("some/draft", ("model", "some/draft")),
    "num_speculative_tokens": (7, ("num_speculative_tokens", 7)),
    "draft_tensor_parallel_size": (1, "noted"),
    "tensor_parallel_size": (2, "refused"),
    "quantization": ("fp8", "refused"),
    "moe_backend": ("triton", "noted"),
    "attention_backend": ("FLASH_ATTN", "noted"),
    "kv_cache_dtype": ("fp8", "refused"),
    "max_model_len": (2048, ("draft_max_model_len", 2048)),
    "revision": ("main", "noted"),
    "code_revision": ("main", "noted"),
    "enforce_eager": (True, "noted"),
    "disable_padded_drafter_batch": (True, "noted"),
    "use_local_argmax_reduction": (True, "noted"),
    "use_heterogeneous_vocab": (True, "noted"),
    "prompt_lookup_max": (6, ("prompt_lookup_max", 6)),
    "prompt_lookup_min": (3, ("prompt_lookup_min", 3)),
    "parallel_drafting": (True, "refused"),
    "num_speculative_tokens_per_batch_size": (
        [[1, 4, 5], [5, 64, 2]],
        ("batch_size_schedule", ((1, 4, 5), (5, 64, 2))),
    ),
    "suffix_decoding_max_tree_depth": (12, ("suffix_max_depth", 12)),
    "suffix_decoding_max_cached_requests": (99, ("suffix_max_requests", 99)),
    "suffix_decoding_max_spec_factor": (2.0, ("suffix_factor", 2.0)),
    "suffix_decoding_min_token_prob": (0.2, ("suffix_min_prob", 0.2)),
    "draft_load_config": ({}, "noted"),
    "rejection_sample_method": ("standard", ("verification", "rejection")),
    "synthetic_acceptance_rates": ([0.5], "refused"),
    "synthetic_acceptance_length": (2.5, "refused"),
    "enable_adaptive_verification": (True, "refused"),
    "draft_sample_method": ("greedy", ("draft_sample_method", "greedy")),
    "dspark_draft_topk": (8, "refused"),
}
LLAMA_CPP: dict[str, tuple[Any, Any]] = {
    "n_max": (16, ("num_speculative_tokens", 16)),
    "n_min": (2, ("min_draft_tokens", 2)),
    "p_min": (0.6, ("p_min", 0.6)),
    "p_split": (0.2, ("p_split", 0.2)),
    "n_parallel": (3, ("max_branches", 3)),
    "n_reuse": (256, "noted"),
}


def method_that_reads(field: str) -> dict[str, str]:
    """A method for which this option is meant."""
    if field.startswith("suffix"):
        return {"method": "suffix"}
    if field in OWN_OPTIONS["draft_model"] and field not in OWN_OPTIONS["ngram"]:
        return {"method": "draft_model", "model": "x"}
    return {"method": "ngram"}


def complaint(value: Any) -> str:
    """What is said about a config that cannot be used: one sentence, or two."""
    with pytest.raises(ConfigError) as caught:
        parse_speculative(value)
    message = str(caught.value)
    assert message.endswith((".", "?")) and "\n" not in message
    return message


# ------------------------------------------------------------------ other people's words
@pytest.mark.parametrize("key", [*VLLM, *LLAMA_CPP])
def test_every_key_of_vllm_and_llama_cpp_is_mapped_noted_or_refused(key: str):
    given, expected = (VLLM | LLAMA_CPP)[key]
    base: dict[str, Any] = {} if key in ("method", "model") else method_that_reads(expected[0])
    if expected[0] in TREE_OPTIONS:
        base["tree"] = True
    if expected == "refused":
        assert key in complaint({**base, key: given})
        return
    config, notes = parse_speculative({**base, key: given})
    if expected == "noted":
        assert len(notes) == 1 and key in notes[0] and "no effect" in notes[0]
        assert config == parse_speculative(base)[0]
    else:
        field, value = expected
        assert notes == []
        assert getattr(config, field) == value


@pytest.mark.parametrize("key", [k for k in VLLM if k != "tensor_parallel_size"])
def test_a_key_of_vllm_set_to_null_is_as_if_left_out(key: str):
    """Dumped configs spell out their defaults; None asks for nothing."""
    config, _ = parse_speculative({"method": "ngram", key: None} if key != "method" else {key: None, "model": "ngram"})
    assert config == SpeculativeConfig("ngram")


@pytest.mark.parametrize("key", ["parallel_drafting", "enable_adaptive_verification"])
def test_a_switch_of_vllm_that_is_off_is_no_reason_to_refuse(key: str):
    assert parse_speculative({"method": "ngram", key: False})[0] == SpeculativeConfig("ngram")


def test_parallel_drafting_is_p_eagle_and_nothing_else():
    spec = {"method": "eagle3", "model": "x", "parallel_drafting": True}
    assert parse_speculative(spec) == (SpeculativeConfig("peagle", "x"), [])
    assert parse_speculative(spec | {"method": "peagle"})[0].method == "peagle"
    for method in ("draft_model", "medusa", "ngram"):
        assert "parallel_drafting is not available" in complaint(spec | {"method": method})


def test_vllm_json_as_it_is():
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    config, notes = parse_speculative(text)
    assert (config.method, config.num_speculative_tokens, config.prompt_lookup_max, notes) == ("ngram", 4, 4, [])
    assert parse_speculative(json.loads(text))[0] == config


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("ngram", "suffix_factor"),
        ("ngram", "p_min"),
        ("suffix", "prompt_lookup_max"),
        ("none", "n_min"),
        ("draft_model", "exit_layer"),
    ],
)
def test_an_option_for_another_method_is_said(method: str, option: str):
    _, notes = parse_speculative({"method": method, option: 1})
    assert any(f"no effect with method {method!r}" in n for n in notes)


@pytest.mark.parametrize("option", [{"p_split": 0.3}, {"n_parallel": 2}, {"top_k": 3}])
def test_an_option_for_trees_is_said_without_one(option: dict[str, Any]):
    base = {"method": "draft_model", "model": "x"}
    assert "without 'tree'" in parse_speculative(base | option)[1][0]
    assert parse_speculative(base | option | {"tree": True})[1] == []


def test_an_option_for_a_drafter_of_ones_own_is_not_judged():
    assert parse_speculative({"method": "a.b.C", "p_min": 0.5, "suffix_factor": 2.0})[1] == []


def test_a_suffix_draft_may_be_longer_than_others():
    assert parse_speculative("suffix")[0].num_speculative_tokens > parse_speculative("ngram")[0].num_speculative_tokens
    assert parse_speculative({"method": "suffix", "n_max": 3})[0].num_speculative_tokens == 3


def test_the_tables_do_not_contradict_each_other():
    own = set(SpeculativeConfig.__dataclass_fields__)
    assert set(ALIASES.values()) <= own
    tables = [own, set(ALIASES), set(NO_EFFECT), set(REFUSED)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert not set(METHOD_ALIASES.values()) & set(METHOD_ALIASES)


# ------------------------------------------------------------------ what is inferred
@pytest.mark.parametrize(
    ("given", "method"),
    [
        (None, "none"), ({}, "none"), ("ngram", "ngram"), ("prompt_lookup", "ngram"), ("[ngram]", "ngram"), ("off", "none"),
        ({"model": "[ngram]"}, "ngram"), ({"model": "ngram"}, "ngram"), ({"num_speculative_tokens": 3}, "ngram"),
        ({"model": "org/draft"}, "draft_model"), ({"method": "draft", "model": "x"}, "draft_model"),
        ({"method": "custom_class", "model": "a.b.C"}, "custom"), ({"method": "a.b.C"}, "a.b.C"), ("suffix", "suffix"),
        (' {"method": "suffix"} ', "suffix"),
    ],
)  # fmt: skip
def test_the_method_is_inferred(given: Any, method: str):
    assert parse_speculative(given)[0].method == method


def test_one_lookup_bound_moves_the_other():
    low = parse_speculative({"method": "ngram", "prompt_lookup_max": 1})[0]
    assert (low.prompt_lookup_min, low.prompt_lookup_max) == (1, 1)
    high = parse_speculative({"method": "ngram", "prompt_lookup_min": 9})[0]
    assert (high.prompt_lookup_min, high.prompt_lookup_max) == (9, 9)


def test_a_config_is_taken_as_it_is():
    config = SpeculativeConfig("ngram", num_speculative_tokens=2)
    assert parse_speculative(config) == (config, [])


def test_nodes_of_a_draft():
    assert SpeculativeConfig(num_speculative_tokens=5).nodes == 5
    assert SpeculativeConfig("draft_model", num_speculative_tokens=5, tree=True).nodes == 20
    assert SpeculativeConfig("draft_model", num_speculative_tokens=5, num_draft_nodes=7, tree=True).nodes == 7
    assert SpeculativeConfig("ngram", num_speculative_tokens=5, tree=True).nodes == 5
    assert SpeculativeConfig(num_speculative_tokens=5, num_draft_nodes=0).nodes == 0


# ------------------------------------------------------------------ mistakes
@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("num_speculative_token", "num_speculative_tokens"), ("num_spec_tokens", "num_speculative_tokens"),
        ("prompt_lookup_mx", "prompt_lookup_max"), ("verificaton", "verification"), ("n_maxx", "n_max"),
        ("rejection_sample_methd", "rejection_sample_method"),
        ("suffix_decoding_max_tree_dept", "suffix_decoding_max_tree_depth"),
    ],
)  # fmt: skip
def test_an_unknown_key_names_the_nearest(slip: str, meant: str):
    message = complaint({slip: 1})
    assert repr(slip) in message and f"Did you mean {meant!r}?" in message


def test_a_key_like_nothing_lists_what_there_is():
    message = complaint({"zzqqxx": 1})
    assert "Known:" in message and "num_speculative_tokens" in message


def test_nearest():
    assert nearest("tempratur", ["temperature", "top_k"]) == " Did you mean 'temperature'?"
    assert nearest("zzz", ["b", "a"]) == " Known: a, b."


@pytest.mark.parametrize("method", LATER)
def test_methods_of_a_later_day_are_said(method: str):
    assert f"{method!r} is not available yet" in complaint(method)


def test_the_same_thing_said_twice():
    assert "second time" in complaint({"n_max": 3, "num_speculative_tokens": 4})
    assert "second time" in complaint({"verification": "walk", "rejection_sample_method": "standard"})


@pytest.mark.parametrize("text", ['{"method": "ngram",}', '{"method"', "{'method': 'ngram'}", '{"method": "ngram"} x'])
def test_broken_json_is_said(text: str):
    assert "not valid JSON" in complaint(text)


@pytest.mark.parametrize("value", [[], 5, 1.5, True, object(), ["ngram"]])
def test_what_is_no_object_is_said(value: Any):
    assert "should be a JSON object" in complaint(value)


def test_an_empty_name_is_no_method():
    assert "method" in complaint("")


@pytest.mark.parametrize("method", ["block", "synthetic", "x", 3])
def test_other_ways_to_reject_are_refused(method: Any):
    assert "rejection_sample_method" in complaint({"method": "ngram", "rejection_sample_method": method})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", 5), ("method", ["ngram"]), ("model", {}), ("model", 7),
        ("num_speculative_tokens", -1), ("num_speculative_tokens", 4097), ("num_speculative_tokens", "5"),
        ("num_speculative_tokens", True), ("num_speculative_tokens", 2.5),
        ("num_draft_nodes", -1), ("num_draft_nodes", 5000), ("top_k", 0), ("top_k", 2000), ("max_branches", 0),
        ("min_draft_tokens", -1), ("p_min", 1.5), ("p_min", -0.1), ("p_min", "a"), ("p_min", math.nan), ("p_split", 2),
        ("prompt_lookup_min", 0), ("prompt_lookup_max", 0), ("prompt_lookup_max", "5"), ("prompt_lookup_min", "5"),
        ("suffix_max_depth", 0), ("suffix_max_tokens", -1), ("suffix_max_requests", -1), ("suffix_min_prob", 1.1),
        ("suffix_factor", 0), ("suffix_factor", -1), ("suffix_factor", "x"), ("suffix_factor", math.inf),
        ("suffix_factor", math.nan),
        ("draft_sample_method", "best"), ("vocab_mapping", "words"), ("verification", "typical"), ("tree", "yes"),
        ("draft_max_model_len", 0), ("draft_max_model_len", "long"),
        ("batch_size_schedule", [[1, 2]]), ("batch_size_schedule", 5), ("batch_size_schedule", [[4, 1, 3]]),
        ("batch_size_schedule", [[0, 1, 3]]), ("batch_size_schedule", [[1, 1, -1]]), ("batch_size_schedule", [["a", 1, 1]]),
    ],
)  # fmt: skip
def test_values_out_of_range_are_said(name: str, value: Any):
    base = {} if name == "method" else {"method": "draft_model", "model": "x"}
    assert name in complaint({**base, name: value})


def test_lookup_bounds_in_the_wrong_order():
    assert "prompt_lookup_min (5)" in complaint({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3})


# ------------------------------------------------------------------ one request's own words
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, RequestSpeculation()),
        (True, RequestSpeculation()),
        (False, RequestSpeculation(enabled=False)),
        ("suffix", RequestSpeculation(method="suffix")),
        ("prompt_lookup", RequestSpeculation(method="ngram")),
        ({}, RequestSpeculation()),
        ({"enabled": False}, RequestSpeculation(enabled=False)),
        ({"method": "off"}, RequestSpeculation(method="none")),
        ({"max_tokens": 3, "verification": "rejection"}, RequestSpeculation(max_tokens=3, verification="rejection")),
        (RequestSpeculation(max_tokens=1), RequestSpeculation(max_tokens=1)),
    ],
)
def test_a_request_speaks_for_itself(given: Any, expected: RequestSpeculation):
    assert parse_request_speculation(given) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable": False}, "Did you mean 'enabled'?"),
        ({"num_speculative_tokens": 3}, "Unknown per-request"),
        ({"enabled": "no"}, "true or false"),
        ({"enabled": None}, "true or false"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"verification": "magic"}, "walk or rejection"),
        ({"method": 5}, "method"),
        ({"method": ["ngram"]}, "method"),
        (5, "not int"),
        ([1], "not list"),
    ],
)
def test_a_request_that_misspeaks(given: Any, words: str):
    with pytest.raises(ConfigError) as caught:
        parse_request_speculation(given)
    assert words in str(caught.value)


# ------------------------------------------------------------------ the engine's own limits
@pytest.mark.parametrize("name", ["max_num_seqs", "max_batch_tokens", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True])
def test_limits_are_whole_and_positive(name: str, value: Any):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [0, -1, "1G"])
def test_kv_memory_is_a_number_of_bytes(value: Any):
    with pytest.raises(ConfigError, match="kv_memory"):
        EngineConfig(kv_memory=value)


def test_config_errors_can_be_caught_as_a_family():
    assert issubclass(ConfigError, HeadstartError) and issubclass(ConfigError, ValueError)
    assert issubclass(BadInput, HeadstartError) and issubclass(BadInput, ValueError)
