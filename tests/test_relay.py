"""`headstart serve --engine`: a stand-in for another engine behind our door, over real sockets on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from headstart import LLM
from headstart.bench.methods import Method
from headstart.cli import app as cli
from headstart.cli.elsewhere import OtherOptions, method
from headstart.cli.options import SpeculationOptions
from headstart.engines import counters, llamacpp, relay, tabbyapi, vllm
from headstart.engines.launching import Child, Launch, Order, Serving, free_port, running
from headstart.engines.relay import Relay, create_relay, watched
from headstart.engines.vetting import vet
from headstart.errors import BadInput, ConfigError, HeadstartError
from headstart.server.app import ServerSettings
from headstart.server.gate import Gate
from headstart.server.metrics import Metrics
from headstart.server.run import on_thread
from tests import tiny, web

FAKE = Path(__file__).with_name("fake_engine.py")
SERVING = Serving("tiny", "between us")
LINES = [f'data: {{"choices": [{{"text": "{word}"}}]}}' for word in ("one", " two", " three", " four")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """One with a Python that is the fake server, whatever it is told to run."""
    script = tmp_path_factory.mktemp("fake") / "env" / "bin" / "python"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.folder(tmp_path_factory.mktemp("model")))


def order(config: dict[str, Any] | None = None, serving: Serving = SERVING, **more: Any) -> Order:
    return Order("model", Method("it", config or {}), free_port(), serving=serving, **more)


@contextmanager
def serving(environment: Path, log: Path, launch: Launch | None = None, **settings: Any) -> Iterator[tuple[str, Any]]:
    """The door's URL, and its app."""
    made = launch or vllm.launch(order({"method": "ngram", "num_speculative_tokens": 3}), str(environment))
    with running(made, log, lambda line: None) as child:
        app = create_relay(child, ServerSettings("tiny", **settings), at_once=2, drafter="ngram")
        with on_thread(app) as (_, url), watched(app):
            yield url, app
        assert app.state.gate.inside == 0, "everybody has left"


@pytest.fixture(scope="module")
def url(environment, tmp_path_factory) -> Iterator[str]:
    with serving(environment, tmp_path_factory.mktemp("log") / "log") as (found, _):
        yield found


def until(what: Any, seconds: float = 60.0) -> Any:
    """What this gives as soon as it gives anything."""
    end = time.monotonic() + seconds
    while not (got := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return got


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def value(command: Any, flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


# ------------------------------------------------------------------ what is forwarded
def test_whole_answers_come_as_they_are(url) -> None:
    got = web.post(f"{url}/v1/completions", json={"prompt": "a", "top_k": 5, "request_id": "mine", "user": None})
    told = got.json()
    assert got.status_code == 200 and told["choices"][0]["text"] == "one two three four"
    expected = {"prompt": "a", "top_k": 5, "request_id": "mine", "model": "tiny", "max_tokens": 16}
    assert told["body"] == expected and told["id"] == got.headers["x-request-id"] == "mine"
    chat = web.post(f"{url}/v1/chat/completions?x=1", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["path"] == "/v1/chat/completions?x=1" and "max_tokens" not in chat["body"], (
        "a talk goes on as far as fits"
    )


def test_streams_come_byte_for_byte(url) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        content = b"".join(answer.iter_raw()).decode()
    usage = '{"completion_tokens": 4, "prompt_tokens": 1}'
    last = f'data: {{"choices": [], "usage": {usage}, "timings": {{"draft_n": 6, "draft_n_accepted": 2}}}}'
    assert content == "\n\n".join([*LINES, last, "data: [DONE]", ""])


def test_openai_s_client_talks_through_it(url) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "fake"
    pieces = [c.choices[0].text for c in client.completions.create(model="tiny", prompt="a", stream=True) if c.choices]
    assert "".join(pieces) == "one two three four"
    with pytest.raises(openai.NotFoundError, match="There is no model 'huge' here"):
        client.completions.create(model="huge", prompt="a")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {"prompt": "wrong"}, 422, "That is wrong."),
        ("/v1/nothing", {}, 404, "Not Found"),
        ("/reset_prefix_cache", {}, 404, "Not Found"),
        ("/v1/%2e%2e/reset_prefix_cache", {}, 404, "There is no /v1/../reset_prefix_cache here"),
        ("/v1/completions", [], 400, "should be a JSON object"),
        ("/v1/completions", {"prompt": "a", "n": 300}, 400, "ask in parts"),
        (
            "/v1/completions",
            {"prompt": "a", "speculative": False},
            400,
            "vLLM drafts for all requests as it was started",
        ),
        ("/v1/completions", {"prompt": "a", "speculative": "ngram"}, 400, "leave out 'speculative'"),
        ("/v1/completions", {"prompt": "a", "stream": True, "show_drafts": True}, 400, "vLLM has no 'show_drafts'"),
        ("/v1/completions", {"prompt": "a", "typical_p": 0.5}, 400, "vLLM has no 'typical_p'"),
    ],
)
def test_mistakes_are_told_in_one_shape(url, path, body, status, words) -> None:
    got = web.post(f"{url}{path}", json=body)
    assert got.status_code == status and words in got.json()["error"]["message"], got.text
    assert got.headers["x-request-id"]


def test_what_is_no_json_is_said(url) -> None:
    got = web.post(f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert got.status_code == 400 and "broken JSON" in got.json()["error"]["message"]


def test_fields_of_ours_that_say_nothing_are_left_out(url) -> None:
    idle = {"speculative": True, "show_drafts": False, "metrics": False, "typical_p": 1}
    body = web.post(f"{url}/v1/completions", json={"prompt": "a", **idle}).json()["body"]
    assert not idle.keys() & body.keys()


def test_a_client_that_leaves_is_left_by_the_child_too(environment, tmp_path) -> None:
    with serving(environment, tmp_path / "log") as (url, app):
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "endless", "stream": True}) as answer:
            pieces = answer.iter_raw()  # held: a generator that nobody holds closes the stream
            next(pieces)
            assert app.state.gate.inside == 1
        assert until(lambda: "the client has left" in (tmp_path / "log").read_text())
        assert until(lambda: app.state.gate.inside == 0)


def test_answers_are_no_longer_than_they_may_be(environment, tmp_path) -> None:
    with serving(environment, tmp_path / "log", max_output_tokens=9) as (url, _):
        asked = {"messages": [], "max_completion_tokens": 100}
        assert web.post(f"{url}/v1/chat/completions", json=asked).json()["body"]["max_completion_tokens"] == 9
        assert web.post(f"{url}/v1/chat/completions", json={"messages": []}).json()["body"]["max_tokens"] == 9
        assert web.post(f"{url}/v1/completions", json={"prompt": "a"}).json()["body"]["max_tokens"] == 9


# ------------------------------------------------------------------ who may come in, and what is told
def test_the_door_is_our_own(environment, tmp_path) -> None:
    options = dict(keys=["secret"], max_body=200, cors_origins=["https://page.example"], max_queue=0)
    with serving(environment, tmp_path / "log", **options) as (url, app):
        assert web.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 401
        assert web.get(f"{url}/metrics").status_code == 401
        assert web.get(f"{url}/health").json() == {"status": "ok", "restarts": 0, "last_error": None}
        assert web.get(f"{url}/ready").json() == {"ready": True}
        mine = {"authorization": "Bearer secret", "origin": "https://page.example"}
        got = web.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=mine)
        assert got.status_code == 200 and got.headers["access-control-allow-origin"] == "https://page.example"
        assert web.post(f"{url}/v1/completions", json={"prompt": "a" * 300}, headers=mine).status_code == 413
        with app.state.gate.enter(2):
            full = web.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=mine)
        assert full.status_code == 429 and full.headers["retry-after"]
        child = app.state.relay.child.launch
        assert web.post(f"{child.url}/v1/completions", json={"prompt": "a"}, headers=mine).status_code == 401, (
            "by nobody else"
        )


def samples(text: str) -> dict[str, tuple[dict[str, str], float]]:
    families = text_string_to_metric_families(text)
    return {s.name: (s.labels, s.value) for family in families for s in family.samples}


@pytest.mark.parametrize("prefix", ["headstart", "vllm"])
def test_metrics_have_our_names(environment, tmp_path, prefix) -> None:
    with serving(environment, tmp_path / "log", metrics_prefix=prefix) as (url, _):
        web.post(f"{url}/v1/completions", json={"prompt": "a"})
        told = samples(web.get(f"{url}/metrics").text)
    drafted = {"model_name": "tiny", "drafter": "ngram"}
    assert told[f"{prefix}:spec_decode_num_drafts_total"] == (drafted, 2.0)
    assert told[f"{prefix}:spec_decode_num_draft_tokens_total"] == (drafted, 6.0)
    assert told[f"{prefix}:spec_decode_wasted_tokens_total"] == ({"model_name": "tiny"}, 4.0)
    assert told[f"{prefix}:num_requests_running"] == ({"model_name": "tiny", "engine": "0"}, 2.0)
    assert told["vllm:its_own"][1] == 7.0 and "process_open_fds" not in told
    route = {"model_name": "tiny", "route": "/v1/completions", "status": "200"}
    assert told[f"{prefix}:http_requests_total"] == (route, 1.0)
    assert told[f"{prefix}:requests_turned_away_total"] == ({"model_name": "tiny"}, 0.0)


def test_llama_cpps_metrics_have_our_names() -> None:
    lines = ["# TYPE llamacpp:tokens_predicted_total counter", "llamacpp:tokens_predicted_total 9"]
    lines += ["# TYPE llamacpp:requests_processing gauge", "llamacpp:requests_processing 1"]
    lines += ["# TYPE llamacpp:prompt_seconds_total counter", "llamacpp:prompt_seconds_total 2.5"]
    lines += ["# TYPE llamacpp:spec_decode_num_draft_tokens_total counter"]
    lines += ["llamacpp:spec_decode_num_draft_tokens_total 5"]
    lines += ["# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter"]
    lines += ["llamacpp:spec_decode_num_accepted_tokens_total 3"]
    found = counters.translate("\n".join(lines) + "\n", "headstart", "tiny", "ngram")
    told = {s.name: s.value for family in found for s in family.samples}
    assert told == {
        "headstart:generation_tokens_total": 9, "headstart:num_requests_running": 1, "llamacpp:prompt_seconds_total": 2.5,
        "headstart:spec_decode_num_draft_tokens_total": 5, "headstart:spec_decode_num_accepted_tokens_total": 3,
        "headstart:spec_decode_wasted_tokens_total": 2,
    }  # fmt: skip
    assert counters.translate("what is this", "headstart", "tiny", "ngram") == []


def test_our_names_are_those_of_our_own_server() -> None:
    with LLM(tiny.loaded(), kv_memory=1 << 22) as llm:
        own = {family.name.removeprefix("headstart:") for family in Metrics(llm, Gate(1), "x").collect()}
    assert {*counters.OURS, counters.WASTED, "http_requests", "requests_turned_away"} <= own
    assert set(counters.THEIRS.values()) <= counters.OURS


# ------------------------------------------------------------------ a child that ends
FAILURES = {
    "torch.OutOfMemoryError: CUDA out of memory": "memory does not suffice",
    "ValueError: There is no module or parameter named 'x.qweight' in LlamaForCausalLM": "not in the form",
    "ValueError: Quantization method specified in the model config (awq) does not match the quantization method specified in "
    "the `quantization` argument (gptq).": "quantised with awq",
    "ValueError: torch.bfloat16 is not supported for quantization method awq.": "--dtype float16",
    "ValueError: method 'dflash' is not supported": "no such method",
    "attention type is not supported\nOSError: [Errno 98] address already in use": "took its port",
    "TimeoutError: Timed out waiting for engine core processes to start.": "VLLM_ENGINE_READY_TIMEOUT_S",
    "what nobody has seen before": "what nobody has seen before",
}


@pytest.mark.parametrize(("text", "words"), FAILURES.items(), ids=range(len(FAILURES)))
def test_one_that_does_not_start_is_said_with_cause_and_remedy(environment, tmp_path, monkeypatch, text, words) -> None:
    monkeypatch.setenv("FAKE_ENGINE", f"ends {text}")
    early = pytest.raises(HeadstartError, match="ended with code 3 before it was ready")
    with early as caught, serving(environment, tmp_path / "log"):
        raise AssertionError("never")
    assert words in str(caught.value) and str(tmp_path / "log") in str(caught.value)


def test_one_that_dies_takes_the_server_along(environment, tmp_path) -> None:
    """Who is being answered is told why, and so is who comes later."""
    with serving(environment, tmp_path / "log") as (url, app):
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "last words", "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == " 0" and lines[-1] == "data: [DONE]"
        why = json.loads(lines[-2].removeprefix("data: "))["error"]
        assert "vLLM ended with code 1: memory does not suffice" in why["message"] and "log" not in why["message"]
        assert until(lambda: app.state.died) and app.state.gate.closing


def test_one_that_is_not_there_is_told_with_its_diagnosis(environment, tmp_path, monkeypatch) -> None:
    """Before anybody has noticed."""
    monkeypatch.setenv("FAKE_ENGINE", "dies")
    monkeypatch.setattr(relay, "watched", None)
    made = vllm.launch(order(), str(environment))
    with running(made, tmp_path / "log", lambda line: None) as child:
        app = create_relay(child, ServerSettings("tiny"), at_once=2)
        with on_thread(app) as (_, url):
            for _ in range(2):
                got = web.post(f"{url}/v1/completions", json={"prompt": "a"})
                assert got.status_code == 503 and got.json()["error"]["type"] == "server_error"
                assert "vLLM ended with code 1: memory does not suffice" in got.json()["error"]["message"]
            health = web.get(f"{url}/health")
            assert health.status_code == 503 and "memory does not suffice" in health.json()["last_error"]
            assert web.get(f"{url}/ready").status_code == 503
            assert "headstart:http_requests_total" in web.get(f"{url}/metrics").text


def test_what_is_not_done_when_the_server_stops_is_told_so(environment, tmp_path) -> None:
    made = vllm.launch(order(), str(environment))
    with running(made, tmp_path / "log", lambda line: None) as child:
        app = create_relay(child, ServerSettings("tiny"), at_once=2)
        with (
            on_thread(app, drain=0.2) as (server, url),
            httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "endless", "stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            last = [line for line in lines if line][-2:]
        assert "shut down before this answer was complete" in last[0] and last[1] == "data: [DONE]"


def test_all_it_says_is_told_line_by_line(environment, tmp_path) -> None:
    said: list[str] = []
    with running(vllm.launch(order(), str(environment)), tmp_path / "log", said.append):
        pass
    assert said == (tmp_path / "log").read_text().splitlines() and said[1].startswith("child ")


# ------------------------------------------------------------------ how engines are told
def test_vllm_is_told_of_several_machines(environment) -> None:
    many = replace(
        SERVING, pipeline_parallel=2, backend="mp", nodes=2, master="10.0.0.1", master_port=29501, kv_memory=1 << 30
    )
    made = vllm.launch(order(serving=many, tensor_parallel=4), str(environment))
    flags = {"--tensor-parallel-size": "4", "--pipeline-parallel-size": "2", "--distributed-executor-backend": "mp",
             "--nnodes": "2", "--node-rank": "0", "--master-addr": "10.0.0.1", "--master-port": "29501",
             "--served-model-name": "tiny", "--kv-cache-memory-bytes": str(1 << 30)}  # fmt: skip
    assert {flag: value(made.command, flag) for flag in flags} == flags
    assert not made.headless and "--headless" not in made.command and made.env["VLLM_API_KEY"] == "between us"
    assert "between us" not in " ".join(made.command) and "VLLM_SERVER_DEV_MODE" not in made.env
    other = vllm.launch(order(serving=replace(many, rank=1)), str(environment))
    assert other.headless and list(other.command[1:5]) == ["-m", "vllm.entrypoints.cli.main", "serve", "model"]
    assert "--headless" in other.command and value(other.command, "--node-rank") == "1"
    ray = vllm.launch(order(serving=replace(SERVING, backend="ray", pipeline_parallel=2)), str(environment))
    assert value(ray.command, "--distributed-executor-backend") == "ray" and "--nnodes" not in ray.command


def test_llama_cpp_is_told_whose_name_it_has(tmp_path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    made = llamacpp.launch(replace(order(at_once=2, max_len=100), model=str(file)), sys.executable)
    told = json.loads(made.command[-1])
    assert told["name"] == "tiny" and told["context"] == 200 and made.env["LLAMA_API_KEY"] == "between us"
    assert value(llamacpp.arguments(told), "--alias") == "tiny"
    asked = _told(made, {"prompt": "a", "repetition_penalty": 1.2, "bad_words": [], "skip_special_tokens": True})
    assert asked == {"model": "tiny", "prompt": "a", "repeat_penalty": 1.2, "max_tokens": 16} | llamacpp.USUAL
    with pytest.raises(BadInput, match="no 'stop_token_ids'"):
        _told(made, {"prompt": "a", "stop_token_ids": [3]})


def _told(launch: Launch, given: dict[str, Any]) -> dict[str, Any]:
    child = Child.__new__(Child)
    child.launch = launch
    return Relay(child, ServerSettings("tiny"), Gate(1)).told("/v1/completions", given)


def test_tabbyapi_opens_no_other_routes(tmp_path) -> None:
    (tmp_path / "main.py").write_text("")
    (tmp_path / "target").mkdir()
    made = tabbyapi.launch(replace(order(), model=str(tmp_path / "target")), str(tmp_path))
    assert "/v1/" not in made.routes and "/v1/completions" in made.routes


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"drafter": "none"}, {}),
        ({"drafter": "ngram", "num_speculative_tokens": 4}, {"method": "ngram", "num_speculative_tokens": 4}),
        ({"draft_model": "small"}, {"method": "draft_model", "model": "small"}),
        ({"drafter": "eagle3", "draft_model": "h", "policy": "fixed"}, {"method": "eagle3", "model": "h"}),
        ({"speculative_config": '{"method": "ngram", "prompt_lookup_max": 4}'}, {"method": "ngram", "prompt_lookup_max": 4}),
        ({"speculative_config": "suffix"}, {"method": "suffix"}),
    ],
)  # fmt: skip
def test_speculation_is_told_as_it_was_said(options, config) -> None:
    assert method(SpeculationOptions(**options), OtherOptions("vllm")).config == config


def test_the_drafts_gpus_are_told_where_somebody_says() -> None:
    other = OtherOptions("vllm", tensor_parallel_size=2, draft_tensor_parallel_size=1)
    made = method(SpeculationOptions(draft_model="small"), other)
    assert made.config["draft_tensor_parallel_size"] == 1
    assert vllm.speculation(Method("x", {"method": "peagle", "model": "h"})) == {
        "method": "eagle3", "model": "h", "parallel_drafting": True, "num_speculative_tokens": 3,
    }  # fmt: skip


@pytest.mark.parametrize("options", [{"tree": True, "draft_model": "x"}, {"static_tree": "x", "draft_model": "y"}])
def test_trees_are_for_our_own_engine(options) -> None:
    with pytest.raises(BadInput, match="llamacpp verifies no trees"):
        method(SpeculationOptions(**options), OtherOptions("llamacpp"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "sglang"], "is not known: choose headstart, vllm"),
        (["--tensor-parallel-size", "2"], "Our own engine computes on one device"),
        (["--engine-args", "--x"], "--engine-args is for other engines"),
        (["--engine", "vllm", "--tensor-parallel-size", "4", "--draft-tensor-parallel-size", "2"], "on 1 GPU, or on as many"),
        (["--engine", "vllm", "--nnodes", "2", "--node-rank", "2"], "they count from 0"),
        (["--engine", "vllm", "--nnodes", "2"], "needs --master-addr"),
        (["--engine", "vllm", "--nnodes", "2", "--distributed-executor-backend", "ray"], "ray start"),
        (["--engine", "vllm", "--distributed-executor-backend", "mpi"], "ray or mp"),
        (["--engine", "vllm:/no/such/place"], "no environment of Python"),
        (["--engine", "vllm:ENV", "--drafter", "auto"], "vLLM has no method 'auto'"),
        (["--engine", "vllm:ENV", "--engine-args", "'"], "cannot be read"),
        (["--engine", "llamacpp:ENV/bin/python"], "runs GGUF files"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(environment, folder, options, words) -> None:
    options = [text.replace("ENV", str(environment)) for text in options]
    result = CliRunner().invoke(cli, ["serve", folder, "--port", "0", *options])
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and last.startswith("headstart: ") and words in last, result.output


def test_what_cannot_work_is_said_before_anything_is_started(folder, tmp_path) -> None:
    broken = tiny.folder(tmp_path / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ConfigError, match="--engine vllm cannot serve this"):
        vet("vllm", replace(order(), model=str(broken)))
    vet("vllm", replace(order({"method": "draft_model", "model": folder}), model=folder))
    with pytest.raises(ConfigError, match="no GGUF file"):
        vet("llamacpp", replace(order(), model=folder))


def test_a_model_that_the_engine_has_to_fetch_is_not_checked(capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    vet("vllm", replace(order(), model="nobody/has-this-one"))
    assert "was not checked" in capsys.readouterr().err


# ------------------------------------------------------------------ as a program
class Program:
    """`headstart serve`, with another engine."""

    def __init__(self, tmp_path: Path, model: str, engine: str, *options: str, wrong: str = "") -> None:
        self.log, self.said = tmp_path / "engine.log", tmp_path / "said"
        code = "import sys; from headstart.cli import main; sys.argv[0] = 'headstart'; main()"
        command = [sys.executable, "-c", code, "serve", model, "--engine", engine, "--port", "0",
                   "--engine-log", str(self.log), "--served-model-name", "tiny", *options]  # fmt: skip
        env = os.environ | {"OMP_NUM_THREADS": "1", "FAKE_ENGINE": wrong}
        with self.said.open("wb") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, env=env)

    def text(self) -> str:
        return self.said.read_text()

    def url(self, seconds: float = 60.0) -> str:
        found = until(lambda: re.search(r"at (http://\S+)/v1", self.text()) or self.process.poll() is not None, seconds)
        assert found and found is not True, self.text()
        assert until(lambda: self._answers(found[1])), self.text()
        return str(found[1])

    def _answers(self, url: str) -> bool:
        try:
            return web.get(f"{url}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def end(self) -> int:
        """Its code, after it was told to stop."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()

    def family(self) -> int:
        """The process that the engine has started."""
        found = until(lambda: re.search(r"^child (\d+)", self.log.read_text() if self.log.exists() else "", re.M))
        assert found, self.text()
        return int(found[1])


@pytest.fixture
def program(environment, tmp_path, folder) -> Iterator[Any]:
    started: list[Program] = []

    def start(*options: str, wrong: str = "") -> Program:
        started.append(Program(tmp_path, folder, f"vllm:{environment}", *options, wrong=wrong))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_a_server_that_is_told_to_stop_leaves_nobody_behind(program) -> None:
    """It is said where its log is, what it cannot be told, and at the level info all it says."""
    own = program("--drafter", "ngram", "-k", "3", "--log-level", "info", "--deterministic", "--kv-type", "q8_0",
                  "--engine-args", "--seed 7")  # fmt: skip
    url, family = own.url(), own.family()
    assert web.post(f"{url}/v1/completions", json={"prompt": "a"}).json()["body"]["model"] == "tiny"
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(60) == 0, own.text()
    assert gone(family)
    text = own.text()
    assert "vllm cannot be told --kv-type, --deterministic, which has no effect" in text and str(own.log) in text
    assert re.search(r"info headstart.engines vLLM: child \d+", text) and '"--seed", "7"' in text
    assert "request ended method=POST route=/v1/completions status=200 prompt_tokens=1 completion_tokens=4" in text
    assert '\\"method\\": \\"ngram\\"' in own.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_end_it_too(program, number) -> None:
    own = program()
    own.url()
    family = own.family()
    own.process.send_signal(number)
    assert own.process.wait(60) == 0, own.text()
    assert gone(family)


def test_one_that_is_not_ready_yet_is_ended_with_its_family(program) -> None:
    own = program(wrong="hangs")
    family = own.family()
    assert own.end() == 128 + signal.SIGTERM and gone(family)


def test_a_server_whose_engine_dies_says_why_and_ends_with_code_1(program) -> None:
    own = program(wrong="dies")
    url, family = own.url(), own.family()
    assert web.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
    assert own.process.wait(60) == 1
    assert "headstart: vLLM ended with code 1: memory does not suffice" in own.text() and str(own.log) in own.text()
    assert gone(family)


def test_a_start_that_fails_is_one_sentence(program) -> None:
    own = program(wrong="ends torch.OutOfMemoryError: CUDA out of memory")
    assert own.process.wait(60) == 2
    assert "headstart: vLLM ended with code 3 before it was ready: memory does not suffice" in own.text()
    slow = program("--start-timeout", "1", wrong="hangs")
    assert slow.process.wait(60) == 2 and "vLLM was not ready after 1 seconds" in slow.text() and gone(slow.family())


def test_a_machine_of_a_higher_rank_has_no_door(program) -> None:
    nodes = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--pipeline-parallel-size", "2")
    own = program(*nodes)
    family = own.family()
    assert until(lambda: "works for 127.0.0.1 as number 1 of 2" in own.text()) and "Serving" not in own.text()
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(60) == 0 and gone(family)
    command = own.log.read_text().splitlines()[0]
    assert "--headless" in command and "--node-rank 1" in command and "--pipeline-parallel-size 2" in command


def test_a_length_that_is_no_number_gets_by_no_limit(environment, tmp_path) -> None:
    with serving(environment, tmp_path / "log", max_output_tokens=9) as (url, _):
        for asked in ({"max_tokens": "1000"}, {"max_tokens": -1}, {"max_tokens": 1000.0}, {"n": "8"}):
            answer = web.post(f"{url}/v1/completions", json={"prompt": "a"} | asked)
            assert answer.status_code == 400 and "whole number" in answer.json()["error"]["message"]
        answer = web.post(f"{url}/v1/completions", json={"prompt": "a", "n_predict": 1000})
        assert answer.json()["body"]["n_predict"] == 9


def test_a_log_that_cannot_be_written_is_said(tmp_path) -> None:
    from headstart.engines.launching import Child, Launch
    from headstart.errors import HeadstartError

    (tmp_path / "file").write_text("")
    with pytest.raises(HeadstartError, match="cannot be written"):
        Child(Launch("vLLM", ["true"], "http://127.0.0.1:9"), tmp_path / "file" / "log")
