"""Other engines that we start ourselves: how they are told, waited for, ended, and what is said when they fail."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headstart.bench import methods, run
from headstart.bench.methods import Method
from headstart.bench.records import Point, Result
from headstart.bench.run import Plan
from headstart.bench.summary import summarise
from headstart.bench.workloads import Prompt, Workload
from headstart.engines import launching, llamacpp, tabbyapi, vllm, xllama
from headstart.engines.diagnosis import KNOWN, diagnose
from headstart.engines.launched import LaunchedEngine, longest
from headstart.engines.launching import Child, Order, free_port, started
from headstart.engines.several import SeveralEngines
from headstart.errors import BadInput, HeadstartError
from tests import tiny

FAKE = Path(__file__).with_name("fake_engine.py")
PLAN = Plan(Workload("two", (Prompt("a", "x", "abcd"), Prompt("b", "x", "efgh"))), (Point(2, 0.0),), 1, 8)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def order(model: Any = "model", config: dict[str, Any] | None = None, **more: Any) -> Order:
    return Order(str(model), Method("it", config or {}), more.pop("port", 8000), **more)


def value(command: Any, flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


@pytest.fixture
def environment(tmp_path) -> Path:
    """One with a Python that is the fake server, whatever it is told to run."""
    script = tmp_path / "env" / "bin" / "python"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script.parent.parent


def engine(environment: Path, tmp_path: Path) -> LaunchedEngine:
    return LaunchedEngine("vllm", str(environment), order(tmp_path / "model"), tmp_path / "logs")


def measured(engine: Any, given: str = "ngram:4", engines: tuple[str, ...] = ("vllm",)) -> Result:
    result = Result({}, {}, {})
    run.run(engine, methods.parse([given], {}, engines), PLAN, result, lambda r: None)
    return result


def gone(pid: int) -> bool:
    """Ended; perhaps nobody has asked for its code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# ------------------------------------------------------------------ from start to end
def test_a_server_for_each_method_is_started_measured_and_ended(environment, tmp_path) -> None:
    result = measured(engine(environment, tmp_path))
    assert [s.text for s in result.samples] == ["one two three four"] * 4 and not result.differences
    lap = next(lap for lap in result.laps if lap.method == "ngram:4")
    assert lap.counts is not None and (lap.counts.drafts, lap.counts.accepted, lap.counts.steps) == (4, 4, 4)
    assert lap.memory and lap.memory > 1e6
    assert summarise(result)[1].block_efficiency == 2.0 and result.methods["ngram:4"]["forgets"] is True
    assert '"method": "ngram"' in value(result.methods["ngram:4"]["command"], "--speculative-config")
    assert "--speculative-config" not in result.methods["none"]["command"]
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == ["vLLM-ngram-4.log", "vLLM-none.log"]
    children = [
        int(line.split()[1]) for log in logs for line in log.read_text().splitlines() if line.startswith("child")
    ]
    assert len(children) == 2 and all(gone(pid) for pid in children), "their families end with them"


@pytest.mark.parametrize(
    "text", ["torch.OutOfMemoryError: CUDA out of memory", "something that nobody has seen before"]
)
def test_one_that_does_not_start_is_said_with_its_reason(environment, tmp_path, monkeypatch, text) -> None:
    monkeypatch.setenv("FAKE_ENGINE", f"ends {text}")
    with pytest.raises(HeadstartError, match="vLLM ended with code 3 before it was ready") as caught:
        measured(engine(environment, tmp_path))
    known = "memory does not suffice" in str(caught.value)
    assert known == ("memory" in text) and (known or text in str(caught.value)) and "vLLM-none.log" in str(caught.value)


def test_one_that_dies_under_way_is_said_with_its_reason(environment, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "dies")
    with pytest.raises(HeadstartError, match="vLLM ended: memory does not suffice"):
        measured(engine(environment, tmp_path))


def test_one_that_never_gets_ready_is_given_up_and_ended(environment, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "hangs")
    child = Child(vllm.launch(order(tmp_path, port=free_port()), str(environment)), tmp_path / "log")
    with pytest.raises(HeadstartError, match="was not ready after 1 seconds"):
        child.wait(1.0)
    child.stop()
    assert child.process.poll() is not None


def test_one_that_does_not_listen_is_killed(environment, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "stays")
    monkeypatch.setattr(launching, "FAREWELL", 0.2)
    with started({"x": vllm.launch(order(tmp_path, port=free_port()), str(environment))}, tmp_path) as children:
        pid = children["x"].process.pid
    assert gone(pid)


def test_where_the_second_does_not_start_the_first_is_ended(environment, tmp_path, monkeypatch) -> None:
    good = vllm.launch(order(tmp_path, port=free_port()), str(environment))
    bad = launching.Launch("nobody", [str(tmp_path / "nothing")], "http://127.0.0.1:9")
    with pytest.raises(HeadstartError, match="nobody cannot be started"), started({"a": good, "b": bad}, tmp_path):
        raise AssertionError("never")
    (line,) = [line for line in (tmp_path / "vLLM-a.log").read_text().splitlines() if line.startswith("child")]
    until = time.monotonic() + 10
    while not gone(int(line.split()[1])) and time.monotonic() < until:
        time.sleep(0.05)
    assert gone(int(line.split()[1]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_is_told_to_end_leaves_nobody_behind(environment, tmp_path, number) -> None:
    """As a program of its own, which is told while a server is up."""
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # who starts us in the background has it ignored
        "from pathlib import Path\n"
        "from headstart.engines.launching import Launch, free_port, started\n"
        "port = free_port()\n"
        f"launch = Launch('fake', [{str(environment / 'bin' / 'python')!r}, '--port', str(port)], f'http://127.0.0.1:{{port}}')\n"
        f"with started({{'x': launch}}, Path({str(tmp_path)!r})):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None and parent.stdout.readline().strip() == "up"
    parent.send_signal(number)
    assert parent.wait(60) != 0
    (line,) = [line for line in (tmp_path / "fake-x.log").read_text().splitlines() if line.startswith("child")]
    assert gone(int(line.split()[1]))


def test_several_engines_take_turns(environment, tmp_path) -> None:
    """Compared with plain decoding of the first."""
    from headstart.bench.own import OwnEngine

    both = SeveralEngines({"headstart": OwnEngine(tiny.with_tools("x")), "vllm": engine(environment, tmp_path)})
    result = measured(both, "ngram:3,vllm/ngram:4", ("headstart", "vllm"))
    assert list(result.methods) == ["none", "vllm/none", "ngram:3", "vllm/ngram:4"]
    assert {lap.method for lap in result.laps} == set(result.methods)
    assert {d.method for d in result.differences} == {"vllm/none", "vllm/ngram:4"}, "it says something else"


# ------------------------------------------------------------------ how they are told
def test_vllm_is_told_in_its_own_words(environment, tmp_path) -> None:
    asked = order("owner/name", {"method": "eagle3", "model": "head", "num_speculative_tokens": 5}, max_len=700, at_once=4,
                  dtype="float32", eager=True, tensor_parallel=2, draft_tensor_parallel=2, share=0.5, threads=3,
                  more=("--seed", "1"))  # fmt: skip
    launch = vllm.launch(asked, str(environment / "bin" / "vllm"))
    command = list(launch.command)
    assert command[:3] == [str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    flags = {"--model": "owner/name", "--port": "8000", "--max-model-len": "700", "--max-num-seqs": "4", "--dtype": "float32",
             "--tensor-parallel-size": "2", "--gpu-memory-utilization": "0.45"}  # fmt: skip
    assert {flag: value(command, flag) for flag in flags} == flags and "--enforce-eager" in command
    told = json.loads(value(command, "--speculative-config") or "")
    assert told == asked.method.config | {"draft_tensor_parallel_size": 2}
    assert command[-2:] == ["--seed", "1"] and launch.env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, None),
        ({"method": "ngram"}, {"method": "ngram", "num_speculative_tokens": 3}),
        ({"method": "suffix"}, {"method": "suffix"}),
        ({"method": "suffix", "num_speculative_tokens": 8}, {"method": "suffix", "num_speculative_tokens": 8}),
        ({"method": "dflash", "model": "d", "num_speculative_tokens": 7},) * 2,
    ],
)
def test_vllm_has_our_keys(config, told) -> None:
    assert vllm.speculation(Method("x", config)) == told


@pytest.mark.parametrize("config", [{"method": "auto"}, {"method": "ngram", "tree": True}])
def test_what_vllm_does_not_have_is_said(config) -> None:
    with pytest.raises(BadInput, match="vLLM"):
        vllm.speculation(Method("x", config))


@pytest.mark.parametrize("module", [vllm, llamacpp, tabbyapi])
def test_an_engine_that_is_not_there_says_how_to_get_it(module, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"install|clone"):
        module.find()
    with pytest.raises(BadInput, match="nowhere"):
        module.find(str(tmp_path / "nowhere" / "x"))


def test_a_gguf_file_is_served_by_vllm_as_the_folder_it_was_converted_to(monkeypatch, environment) -> None:
    monkeypatch.setattr("headstart.models.load.gguf_file", lambda name: Path(name) if name.endswith("gguf") else None)
    monkeypatch.setattr("headstart.models.load.resolve", lambda name: Path("/kept/folder"))
    assert value(vllm.launch(order("x.gguf"), str(environment)).command, "--model") == "/kept/folder"


@pytest.fixture
def gguf(tmp_path) -> str:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


def test_llama_server_is_told_in_its_own_words(tmp_path, gguf, monkeypatch) -> None:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    command = list(llamacpp.launch(order(gguf, NGRAM, max_len=500, at_once=4, threads=2, more=("--mlock",))).command)
    flags = {"--model": gguf, "--parallel": "4", "--ctx-size": "2000", "--threads": "2", "--spec-type": "ngram-simple",
             "--spec-ngram-simple-size-m": "4", "--spec-ngram-simple-size-n": "3"}  # fmt: skip
    assert command[0] == str(server) and command[-1] == "--mlock" and "--metrics" in command
    assert {flag: value(command, flag) for flag in flags} == flags
    drafted = {"method": "draft_model", "model": gguf, "num_speculative_tokens": 6}
    command = list(llamacpp.launch(order(gguf, drafted), str(server)).command)
    flags = {"--spec-type": "draft-simple", "--spec-draft-n-max": "6", "--spec-draft-model": gguf}
    assert {flag: value(command, flag) for flag in flags} == flags
    assert "--spec-type" not in llamacpp.launch(order(gguf), str(server)).command


def test_llama_cpp_has_its_limits(tmp_path, gguf) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match="runs GGUF files"):
        llamacpp.launch(order(tmp_path / "folder"), sys.executable)
    with pytest.raises(BadInput, match="no method 'suffix'"):
        llamacpp.launch(order(gguf, {"method": "suffix"}), sys.executable)
    with pytest.raises(BadInput, match="the draft"):
        llamacpp.launch(order(gguf, {"method": "draft_model", "model": str(tmp_path / "folder")}), sys.executable)
    with pytest.raises(BadInput, match="takes no --engine-args"):
        llamacpp.launch(order(gguf, more=("--mlock",)), sys.executable)


def test_the_wheels_server_is_told_the_same(gguf, monkeypatch) -> None:
    """By a stand-in for the wheel."""

    class Any_:
        def __init__(self) -> None:
            self.size_m = self.size_n = self.n_max = 0

        def __getattr__(self, name: str) -> Any:
            return self.__dict__.setdefault(name, Any_())

    class Wheel:
        CommonParams = Any_
        Server = staticmethod(lambda params: params)

        class common_speculative_type:
            COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE, COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE = "ngram", "draft"

    monkeypatch.setitem(sys.modules, "xllamacpp", Wheel)
    command = list(llamacpp.launch(order(gguf, NGRAM, max_len=500, at_once=2, threads=2), sys.executable).command)
    assert command[:2] == [sys.executable, xllama.__file__]
    params = xllama.serve(json.loads(command[2]))
    assert (params.model.path, params.n_parallel, params.n_ctx, params.port) == (gguf, 2, 1000, 8000)
    assert params.cpuparams.n_threads == 2 and params.endpoint_metrics is True
    assert params.speculative.types == ["ngram"] and params.speculative.ngram_simple.size_m == 4
    drafted = {"method": "draft_model", "model": gguf, "num_speculative_tokens": 6}
    params = xllama.serve(json.loads(list(llamacpp.launch(order(gguf, drafted), sys.executable).command)[2]))
    assert params.speculative.draft.n_max == 6 and params.speculative.draft.mparams.path == gguf


def test_tabbyapi_is_told_in_its_own_words(tmp_path) -> None:
    (tmp_path / "main.py").write_text("")
    (tmp_path / "target").mkdir()
    drafted = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 4}
    launch = tabbyapi.launch(order(tmp_path / "target", drafted, max_len=700, at_once=2), str(tmp_path))
    flags = {"--model-dir": str(tmp_path), "--model-name": "target", "--max-seq-len": "700", "--cache-size": "1536",
             "--max-batch-size": "2", "--draft-mode": "model", "--draft-model-dir": str(tmp_path),
             "--draft-model-name": "draft", "--draft-num-tokens": "4", "--disable-auth": "true"}  # fmt: skip
    assert {flag: value(launch.command, flag) for flag in flags} == flags
    assert launch.folder == tmp_path.resolve() and launch.command[1] == "main.py"
    for config, mode in (({}, "disabled"), ({"method": "ngram"}, "ngram"), ({"method": "mtp"}, "mtp")):
        assert value(tabbyapi.launch(order(tmp_path / "target", config), str(tmp_path)).command, "--draft-mode") == mode
    with pytest.raises(BadInput, match="no method 'eagle3'"):
        tabbyapi.launch(order(tmp_path / "target", {"method": "eagle3"}), str(tmp_path))
    with pytest.raises(BadInput, match="runs folders"):
        tabbyapi.launch(order(tmp_path / "none"), str(tmp_path))


def test_room_for_every_prompt_and_its_answer() -> None:
    talk = Prompt("c", "x", ({"role": "user", "content": "x" * 4000},))
    assert longest(Plan(Workload("w", (talk,)), (Point(1, 0.0),), max_tokens=100)) >= 2100
    assert longest(Plan(Workload("w", (Prompt("d", "x", tuple(range(900))),)), (Point(1, 0.0),), max_tokens=8)) >= 908


# ------------------------------------------------------------------ diagnoses
@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", "built for another torch"),
        ("ModuleNotFoundError: No module named 'arctic_inference'", "arctic-inference"),
        ("ModuleNotFoundError: No module named 'exllamav3'", "exllamav3 is missing"),
        ("ValueError: Free memory on device cuda:0 (3.1/24 GiB) on startup is less than desired GPU memory", "memory does not"),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", "memory does not suffice"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "cut off or damaged"),
        ("gguf_init_from_reader: invalid magic characters: 'abcd', expected 'GGUF'", "GGUF file is cut off"),
        ("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.", "--dtype float16"),
        ("ValueError: The quantization method awq is not supported for the current GPU. Minimum capability: 75", "too old"),
        ("ValueError: User-specified max_model_len (900) is greater than the derived max_model_len", "--max-model-len"),
        ("OSError: [Errno 98] address already in use", "try again"),
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "newer version"),
        ("error: unknown speculative type: draft-foo", "no such method"),
        ("ValueError: Available memory on node 0 (3.0/23.4 GiB) on startup is less than desired CPU memory", "memory does not"),
        ("RuntimeError: Cannot find any model weights with `/models/x`", "as safetensors"),
        ("ValueError: There is no module or parameter named 'model.layers.0.qweight' in LlamaForCausalLM.", "not in the form"),
        ("llama_model_load: error loading model: missing tensor 'output_norm.weight'", "not in the form"),
        ("ValueError: Quantization method specified in the model config (awq) does not match the quantization method specified "
         "in the `quantization` argument (gptq).", "quantised with awq, and it is told gptq"),
        ("ValueError: torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [...]", "float16"),
        ("ValueError: Unknown quantization method: exl9. Must be one of [...]", "how the weights are quantised"),
        ("ValidationError: 1 validation error for SpeculativeConfig\nmethod\n  Input should be", "no such method"),
        ("api_server.py: error: unrecognized arguments: --spec-foo 3", "no option --spec-foo"),
        ("error: invalid argument: --draft-max", "no option --draft-max"),
        ("TimeoutError: Timed out waiting for engine core processes to start.", "VLLM_ENGINE_READY_TIMEOUT_S"),
        ("DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", "--master-addr"),
        ("ImportError: Failed to import Ray: No module named 'ray'.", "pip install ray"),
        ("ValueError: Cannot provide a placement group requiring 8 GPUs", "ray status"),
        ("ValueError: World size (4) is larger than the number of available GPUs (1) in this node.", "4 GPUs are asked for"),
        ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", "rank above 0"),
        ("all is well", None),
    ],
)  # fmt: skip
def test_known_errors_are_told_in_words(log, said) -> None:
    found = diagnose(f"INFO starting\n{log}\nmore")
    assert found is None if said is None else said in (found or "")


def test_every_diagnosis_ends_in_a_remedy() -> None:
    assert all(meaning.endswith(".") and "\n" not in meaning for _, meaning in KNOWN)
