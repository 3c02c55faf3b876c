"""vLLM and llama.cpp themselves, started by us on the built-in model: `make engines` (minutes, and 2 GB to fetch once)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from headstart.bench import methods, run
from headstart.bench.own import OwnEngine
from headstart.bench.records import Point, Result
from headstart.bench.run import Plan
from headstart.bench.workloads import Prompt, Workload
from headstart.engines.launched import LaunchedEngine
from headstart.engines.launching import Order
from headstart.engines.several import SeveralEngines
from headstart.models.load import load
from tests import web
from tests.test_relay import Program, gone, samples

ROOT = Path(__file__).parents[2]
VLLM, LLAMA = ROOT / ".venv-vllm", ROOT / ".venv-xllamacpp" / "bin" / "python"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("HEADSTART_ENGINES" not in os.environ, reason="make engines runs these"),
]
TALKS = (
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog near the river bank.",
    "List the numbers from one to fifteen in words.",
)
PROMPTS = tuple(Prompt(f"p{i}", "x", ({"role": "user", "content": text},)) for i, text in enumerate(TALKS))
PLAN = Plan(Workload("two", PROMPTS), (Point(1, 0.0), Point(2, 0.0)), rounds=1, max_tokens=48)


def measured(name: str, where: Path, tmp_path: Path, given: str) -> Result:
    """Beside plain decoding of our own, in float32."""
    if not where.exists():
        pytest.skip(f"{where.name} is not there")
    order = Order("smollm2", methods.Method("none"), 0, dtype="float32", threads=2, eager=True)
    theirs = LaunchedEngine(name, str(where), order, tmp_path)
    ours = OwnEngine(load("smollm2", "cpu", "float32", runner="torch"), {"kv_memory": 1 << 28})
    result = Result({}, {}, {})
    asked = methods.parse([given], {}, ("headstart", name))
    run.run(SeveralEngines({"headstart": ours, name: theirs}), asked, PLAN, result, lambda r: None)
    assert all(s.error is None for s in result.samples)
    return result


def texts(result: Result, method: str) -> list[str]:
    return [s.text for s in result.samples if s.method == method]


def test_vllm_says_the_same_with_drafts_and_without_and_as_we_do(tmp_path) -> None:
    result = measured("vllm", VLLM, tmp_path, "vllm/ngram:4")
    assert texts(result, "vllm/none") == texts(result, "vllm/ngram:4") == texts(result, "none")
    laps = [lap for lap in result.laps if lap.method == "vllm/ngram:4"]
    assert all(lap.counts and lap.counts.drafts and lap.counts.accepted for lap in laps)
    about = result.methods["vllm/ngram:4"]
    assert about["forgets"] is True and about["version"] and about["memory"] > 5e8


def test_llama_cpp_says_the_same_with_a_draft_and_without(tmp_path) -> None:
    result = measured("llamacpp", LLAMA, tmp_path, "llamacpp/ngram:5,llamacpp/draft_model:smollm2:3")
    for point in PLAN.points:
        plain = [s.text for s in result.of("llamacpp/none", point)]
        same = [s.text for s in result.of("llamacpp/draft_model:smollm2:3", point)]
        assert sum(a == b for a, b in zip(plain, same, strict=True)) >= 1, "it may swap near-ties in larger batches"
    drafted = [lap.counts for lap in result.laps if lap.method == "llamacpp/draft_model:smollm2:3"]
    assert all(c and c.accepted and c.drafted and c.accepted / c.drafted > 0.9 for c in drafted), "it drafts for itself"
    assert result.methods["llamacpp/none"]["forgets"] is True


# ------------------------------------------------------------------ behind our door
@contextmanager
def served(engine: str, where: Path, tmp_path: Path, *options: str) -> Iterator[tuple[openai.OpenAI, str]]:
    """A client for `headstart serve --engine`, and its URL. In the end nobody is left behind."""
    if not where.exists():
        pytest.skip(f"{where.name} is not there")
    own = Program(tmp_path, "smollm2", f"{engine}:{where}", "--threads", "2", "--max-model-len", "1024", *options)
    try:
        url = own.url(600)
        children = [path for path in Path("/proc").glob("[0-9]*") if _parent(path) == own.process.pid]
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), url
    finally:
        code = own.end()
    assert code == 0 and children and all(gone(int(path.name)) for path in children), own.text()


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def talk(client: openai.OpenAI) -> str:
    """The same, whole and as a stream."""
    asked = dict(model="tiny", messages=[{"role": "user", "content": TALKS[0]}], max_tokens=40, temperature=0)
    whole = client.chat.completions.create(**asked).choices[0].message.content  # type: ignore[call-overload]
    stream = client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole
    return str(whole)


def test_vllm_serves_behind_our_door(tmp_path) -> None:
    options = ("--drafter", "ngram", "-k", "4", "--no-kernels", "--dtype", "float32", "--kv-memory", "512MiB")
    with served("vllm", VLLM, tmp_path, *options) as (client, url):
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert talk(client)
        with pytest.raises(openai.BadRequestError, match="leave out 'speculative'"):
            client.completions.create(model="tiny", prompt="a", extra_body={"speculative": False})
        told = samples(web.get(f"{url}/metrics").text)
        drafts = told["headstart:spec_decode_num_drafts_total"]
        assert drafts[1] > 0 and drafts[0]["drafter"] == "ngram" and drafts[0]["model_name"] == "tiny"
        assert (
            told["headstart:generation_tokens_total"][1] > 0
            and told["headstart:e2e_request_latency_seconds_count"][1] == 2
        )


def test_llama_cpp_serves_behind_our_door_with_a_draft(tmp_path) -> None:
    with served("llamacpp", LLAMA, tmp_path, "--draft-model", "smollm2", "-k", "3") as (client, url):
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert talk(client)
        told = samples(web.get(f"{url}/metrics").text)
        assert told["headstart:spec_decode_num_accepted_tokens_total"][1] > 0
        assert told["headstart:spec_decode_num_drafts_total"][0] == {"model_name": "tiny", "drafter": "draft_model"}
        assert told["headstart:generation_tokens_total"][1] > 0
