"""vLLM serves the head that comes along, and accepts of its drafts what Headstart accepts. It takes minutes on a CPU.

`make peers` has no vLLM, whose builds for CPUs and GPUs differ: this is for an environment that has it, Headstart and pytest.
Run it with `-rP`, and it tells what was accepted.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed here", allow_module_level=True)

from typer.testing import CliRunner

from headstart import LLM, SamplingParams
from headstart.cli import app
from headstart.core import Stats
from headstart.models.load import resolve

pytestmark = pytest.mark.real
DEPTH, TOKENS = 3, 96
PROMPTS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?",
    "Write a python function that checks if a number is prime.",
]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("head")
    done = CliRunner().invoke(app, ["convert", "smollm2", "--out", str(out), "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    return str(out)


def ours(head: str, asked: list[list[int]]) -> tuple[list[list[int]], Stats]:
    how = {"method": "eagle3", "model": head, "num_speculative_tokens": DEPTH, "draft_dtype": "float32"}
    with LLM("smollm2", device="cpu", dtype="float32", speculative=how, runner="torch") as llm:
        outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=TOKENS))
    return [list(o.token_ids) for o in outputs], Stats.total([o.stats for o in outputs])


def theirs(head: str, asked: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    import vllm

    how = {"method": "eagle3", "model": head, "num_speculative_tokens": DEPTH}
    llm = vllm.LLM(
        str(resolve("smollm2")),
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=len(asked),
        disable_log_stats=False,
        speculative_config=how,
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=TOKENS)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], params)
    metrics = {m.name.split("spec_decode_")[-1]: m for m in llm.get_metrics() if "spec_decode_" in m.name}
    return [list(o.outputs[0].token_ids) for o in outputs], metrics


def test_the_same_texts_and_about_the_same_acceptance(head: str, monkeypatch: pytest.MonkeyPatch):
    """Exactly the same it cannot be: vLLM drafts on behind the end of a text."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with LLM("smollm2", device="cpu", dtype="float32", runner="torch", kv_memory=1 << 26) as llm:
        asked = [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    texts, stats = ours(head, asked)
    their_texts, metrics = theirs(head, asked)
    assert their_texts == texts
    drafts, by_position = metrics["num_drafts"].value, metrics["num_accepted_tokens_per_pos"].values
    print(f"vLLM: {drafts} drafts, accepted {by_position}; Headstart: {stats.drafts}, {stats.accepted_by_position}")
    accepted = [n / drafts for n in by_position]
    assert abs(drafts - stats.drafts) <= 4 * len(asked)
    assert accepted == pytest.approx(stats.acceptance_by_position, abs=0.05)
