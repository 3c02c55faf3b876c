"""The command line as a user meets it: options, output, errors, help; on a tiny model in a folder."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart import LLM, BadInput, Chunk, ConfigError, SamplingParams
from headstart.cli import app
from headstart.cli.options import SpeculationOptions, parse_bytes
from headstart.cli.paint import Painter, visible
from headstart.cli.sampling import GenerateSampling
from tests import tiny

PROMPT = "the quick brown fox the quick brown"
FEW = ["--max-tokens", "12", "--ignore-eos", "--kv-memory", "16MB", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def without_template(tmp_path_factory) -> str:
    path = tiny.folder(tmp_path_factory.mktemp("raw"))
    (path / "chat_template.jinja").unlink()
    return str(path)


def headstart(*args: str, code: int = 0, text: str | None = None):
    result = CliRunner().invoke(app, list(args), input=text)
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def terminal(*args: str, columns: int = 120) -> str:
    """What a real terminal gets to see."""
    master, slave = pty.openpty()
    env = os.environ | {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from headstart.cli import main; main()", *args]
    running = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=subprocess.DEVNULL, env=env)
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(master)
    assert running.wait() == 0, seen.decode()
    return seen.decode()


# ------------------------------------------------------------------ help
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from headstart.cli import app; "
        "assert CliRunner().invoke(app, ['generate', '--help']).exit_code == 0; "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_help_teaches() -> None:
    assert "headstart demo" in headstart("--help").output
    for verb in ("generate", "chat", "demo", "models", "tree", "simulate", "serve"):
        assert "Example: headstart " in headstart(verb, "--help").output
    assert headstart("--version").output.startswith("headstart 0.")


def test_every_sampling_parameter_is_an_option() -> None:
    forms = {"json_schema", "regex", "grammar"}  # of structured outputs
    ours = {f.name for f in fields(GenerateSampling)} - {"keep_special_tokens"} - forms
    ours |= {"skip_special_tokens", "structured_outputs"}
    assert ours == {f.name for f in fields(SamplingParams)} - {"detokenize"}  # who reads a terminal reads text


# ------------------------------------------------------------------ options
def test_sampling_options_become_parameters() -> None:
    given = GenerateSampling(
        logit_bias='{"5": -2}',
        stop=["x", "yz"],
        bad_words=["no"],
        stop_token_ids=["3,4", "9"],
        n=2,
        keep_special_tokens=True,
    )
    params = given.params()
    assert params.logit_bias == {5: -2.0} and params.stop == ("x", "yz") and params.bad_words == ("no",)
    assert params.stop_token_ids == (3, 4, 9) and params.n == 2 and not params.skip_special_tokens and params.greedy


def test_forms_come_as_text_or_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    for given in (str(tmp_path / "schema.json"), '{"type": "array"}'):
        assert GenerateSampling(json_schema=given).params().structured_outputs.json == '{"type": "array"}'
    assert GenerateSampling(regex="a+").params().structured_outputs.regex == "a+"
    assert GenerateSampling(grammar='root ::= "a"').params().structured_outputs.grammar == 'root ::= "a"'
    assert GenerateSampling().params().structured_outputs is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("1000", 1000), ("7 kb", 7000), ("3B", 3)],
)
def test_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2XB", "-1GB", "2GB3"])
def test_what_is_no_memory(text: str) -> None:
    with pytest.raises(BadInput, match="2GB, 512MiB"):
        parse_bytes(text)


def test_speculation_options_become_a_config() -> None:
    assert SpeculationOptions().config().method == "auto"
    assert SpeculationOptions(num_speculative_tokens=3).config().num_speculative_tokens == 3
    assert SpeculationOptions().config(default="ngram").method == "ngram"
    own = SpeculationOptions(draft_model="m", num_speculative_tokens=3, tree=True, verification="rejection").config()
    assert (own.method, own.model, own.num_speculative_tokens) == ("draft_model", "m", 3)
    assert own.tree and own.verification == "rejection"
    vllm = SpeculationOptions(
        speculative_config='{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
    )
    assert vllm.config().prompt_lookup_max == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafter": "none", "num_speculative_tokens": 3}, "--num-speculative-tokens has no effect without a drafter"),
        ({"policy": "fixed"}, "'auto' decides how much is drafted"),
        ({"drafter": "none", "tree": True}, "--tree has no effect without"),
        ({"drafter": "ngram", "tree": True}, "drafts chains"),
        ({"drafter": "ngram", "draft_model": "m"}, "--draft-model has no effect"),
        ({"drafter": "draft_model"}, "add --draft-model"),
        ({"drafter": "ngram", "speculative_config": "{}"}, "leave out --drafter"),
        ({"speculative_config": '{"metod": "ngram"}'}, "Did you mean 'method'"),
        ({"drafter": "ngram", "verification": "wlk"}, "walk or rejection"),
    ],
)
def test_contradictory_speculation(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SpeculationOptions(**options).config()


# ------------------------------------------------------------------ generate
def test_generate_prints_the_text_alone(folder: str) -> None:
    with LLM(folder, kv_memory=1 << 24) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        raw = llm.generate(PROMPT, params)[0].text
        chat = llm.chat([{"role": "system", "content": "a"}, {"role": "user", "content": PROMPT}], params)[0].text
    assert headstart("generate", PROMPT, "-m", folder, "--raw", *FEW).stdout == raw + "\n"
    assert headstart("generate", PROMPT, "-m", folder, "--system", "a", *FEW).stdout == chat + "\n"
    piped = headstart("generate", "-", "-m", folder, "--raw", "-d", "ngram", *FEW, text=PROMPT + "\n")
    assert piped.stdout == raw + "\n"
    assert "12 tokens in" in piped.stderr and "tokens/s" in piped.stderr
    assert headstart("generate", PROMPT, "-m", folder, "-q", *FEW).stderr == ""


def test_json_is_whole_and_the_drafter_changes_nothing(folder: str) -> None:
    common = [
        "generate",
        PROMPT,
        "-m",
        folder,
        "--json",
        "--temperature",
        "0.8",
        "--seed",
        "7",
        "-n",
        "2",
        "--logprobs",
        "2",
    ]
    plain = json.loads(headstart(*common, *FEW, "--drafter", "none").stdout)
    fast = json.loads(headstart(*common, *FEW, "--prompt-logprobs", "1", "--drafter", "suffix", "-k", "3").stdout)
    assert [c["token_ids"] for c in plain["completions"]] == [c["token_ids"] for c in fast["completions"]]
    first = plain["completions"][0]
    assert {"text", "token_ids", "finish_reason", "stop_reason", "seed", "logprobs", "stats"} <= set(first)
    assert first["seed"] == 7 and first["finish_reason"] == "length" and len(first["logprobs"]) == 12
    assert first["stats"]["block_efficiency"] == 1.0 and plain["drafter"] == "none" and fast["drafter"] == "suffix"
    assert plain["prompt"] == PROMPT and plain["chat"] and plain["model"] == folder
    assert fast["prompt_logprobs"][0] is None and len(fast["prompt_logprobs"]) == len(fast["prompt_token_ids"])
    assert set(plain["versions"]) == {"python", "headstart", "torch", "transformers"}


def test_several_answers_and_the_profile(folder: str) -> None:
    result = headstart(
        "generate", PROMPT, "-m", folder, "-n", "3", "--temperature", "1", "--profile", "--logprobs", "1", *FEW
    )
    assert [line for line in result.stdout.splitlines() if line.startswith("---")] == [
        f"--- {i} of 3" for i in (1, 2, 3)
    ]
    for part in ("draft", "target", "verify", "host", "ms per step", "share"):
        assert part in result.stderr
    assert "36 tokens in" in result.stderr and "with --json only" in result.stderr


def test_a_drafter_from_the_folder_one_stands_in(folder: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_drafter.py").write_text(
        "from headstart import Draft, Drafter\n"
        "class Echo(Drafter):\n"
        "    def propose(self, view):\n"
        "        return Draft.chains([r.tokens[-r.budget :] for r in view.requests])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_drafter", raising=False)
    result = headstart("generate", PROMPT, "-m", folder, "-d", "my_drafter.Echo", "--json", *FEW)
    assert json.loads(result.stdout)["completions"][0]["stats"]["by_drafter"].keys() == {"my_drafter.Echo"}


def test_accepted_tokens_are_coloured_in_a_terminal(folder: str) -> None:
    seen = terminal("generate", PROMPT, "-m", folder, "--draft-model", folder, "--max-tokens", "20")
    assert "\x1b[32m" in seen


# ------------------------------------------------------------------ serve
def test_a_server_is_set_up_by_flags_the_environment_and_a_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(
        'port = 8123\nmax-queue = 4\ndrain = 2.5\napi_key = ["secret"]\nspeculative_config = {method = "ngram"}'
    )
    monkeypatch.setenv("HEADSTART_SERVE_MAX_QUEUE", "7")
    monkeypatch.setenv("HEADSTART_SERVE_DRAIN", "9")
    shown = headstart("serve", "--config", str(path), "--drain", "11", "--show-config").stdout
    lines = shown.splitlines()
    assert {"port: 8123", "max_queue: 7", "drain: 11.0"} <= set(lines) and "secret" not in shown
    again = tmp_path / "shown.yaml"
    again.write_text(shown)
    monkeypatch.delenv("HEADSTART_SERVE_MAX_QUEUE")
    monkeypatch.delenv("HEADSTART_SERVE_DRAIN")
    assert headstart("serve", "--config", str(again), "--show-config").stdout == shown, "what is shown can be read"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", b"prot = 1", "Did you mean 'port'"),
        ("a.toml", b"port = ", "not valid TOML"),
        ("a.yaml", b"port: [", "not valid YAML"),
        ("a.yaml", b"- port", "names and values"),
        ("a.txt", b"port = 1", "should end in .toml"),
        ("a.toml", b"\xff\xfe", "cannot be read"),
        ("a.toml", b'api_key = [""]', "would let everybody in"),
        ("a.toml", b'log_level = "loud"', "is not known"),
        ("a.toml", b'api_key_file = "/no/such/file"', "cannot be read"),
        ("a.toml", b"show_config = true", "unknown option"),
        ("a.toml", b'max_body = "lots"', "--max-body 'lots'"),
        ("a.toml", b"port = 99999", "0 to 65535"),
        ("a.toml", b'host = "256.1.1.1"', "cannot be served"),
        ("a.toml", b'ssl_certfile = "/no/such/cert.pem"', "--ssl-certfile"),
        ("a.toml", b'ssl_keyfile = "/no/such/key.pem"', "--ssl-certfile"),
    ],
)
def test_a_mistake_in_a_servers_file_is_one_sentence(tmp_path: Path, name: str, text: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(text)
    result = headstart("serve", "--config", str(tmp_path / name), "-m", "/no/such/model", code=2)
    assert result.stderr.startswith("headstart: ") and words in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = headstart("serve", "--port", port, "-m", "/no/such/model", code=2)
    assert f"127.0.0.1:{port} cannot be served: Address already in use" in result.stderr


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["hi", "-m", "nope"], "There is no model 'nope'"),
        (["hi", "--drafter", "ngrm"], "Did you mean 'ngram'"),
        (["hi", "--top-p", "3"], "top_p=3.0 is not usable"),
        (["hi", "--threads", "0"], "at least 1"),
        (["hi", "--kv-memory", "lots"], "2GB, 512MiB"),
        (["hi", "--logit-bias", "[1]"], "maps token ids to numbers"),
        (["hi", "--stop-token-ids", "x"], "should be token ids"),
        (["hi", "--regex", "a", "--json-schema", "{}"], "json and regex were given"),
        (["hi", "--regex", "[a", "-m", "FOLDER"], "regex cannot be used"),
        (["hi", "--speculative-config", "{"], "not valid JSON"),
        (["hi", "--device", "abacus", "-m", "FOLDER"], "is not a device"),
        (["hi", "--raw", "--system", "x", "-m", "FOLDER"], "--system needs a chat template"),
        (["hi", "--logit-bias", '{"99999": 1}', "-m", "FOLDER"], "outside the vocabulary"),
    ],
)
def test_a_mistake_is_one_sentence(folder: str, args: list[str], words: str) -> None:
    result = headstart("generate", *[folder if a == "FOLDER" else a for a in args], "-q", code=2)
    assert result.stdout == "" and result.stderr.startswith("headstart: ") and words in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("args", "text"), [(["generate", ""], None), (["generate", "-"], " \n")])
def test_an_empty_prompt_is_said_before_a_model_is_loaded(args: list[str], text: str | None) -> None:
    result = CliRunner().invoke(app, [*args, "-m", "/no/such/model"], input=text)
    assert result.exit_code == 2 and "The prompt is empty" in result.stderr


def test_unknown_verb_and_flag() -> None:
    assert "No such command 'generat'" in headstart("generat", code=2).output
    assert "No such option" in headstart("generate", "hi", "--temprature", "1", code=2).output


def test_ctrl_c_ends_cleanly(folder: str, monkeypatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert "Traceback" not in headstart("generate", "hi", "-m", folder, *FEW, code=130).output


# ------------------------------------------------------------------ chat
def test_chat_from_a_pipe(folder: str) -> None:
    lines = ["the birds", "/stats", "", "/help", "/what", "sing", "/reset", "/stats", "/exit", "never said"]
    result = headstart("chat", "-m", folder, "-d", "ngram", *FEW, text="\n".join(lines))
    with LLM(folder, kv_memory=1 << 24) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        talk = [{"role": "user", "content": "the birds"}]
        first = llm.chat(talk, params)[0].text
        talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "sing"}]
        second = llm.chat(talk, params)[0].text
    assert result.stdout == f"{first}\n{second}\n"
    for words in ("1 answer: 12 tokens", "2 answers: 24 tokens", "/reset", "Unknown command /what", "starts anew"):
        assert words in result.stderr


def test_chat_survives_a_turn_that_is_too_long(folder: str) -> None:
    result = headstart("chat", "-m", folder, *FEW, text="a b " * 600 + "\nthe birds\n")
    assert "Shorten it" in result.stderr and len(result.stdout.splitlines()) >= 1


def test_ctrl_c_stops_an_answer_not_the_chat(folder: str, monkeypatch) -> None:
    asked = []

    def interrupted(self, messages, params):
        asked.append([m["content"] for m in messages])
        yield Chunk("so far", [5], [False])
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    result = headstart("chat", "-m", folder, *FEW, text="one\ntwo\n")
    assert result.stdout == "so far ...\n" * 2
    assert asked == [["one"], ["one", "so far", "two"]]


def test_chat_needs_a_template(without_template: str) -> None:
    assert "has no chat template" in headstart("chat", "-m", without_template, *FEW, code=2, text="hi").stderr
    assert headstart("generate", PROMPT, "-m", without_template, *FEW).stdout


# ------------------------------------------------------------------ models
def test_models_lists_what_is_there(tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "fetched on first use" in headstart("models").stdout
    _fake_hub(tmp_path / "hub" / "models--owner--name")
    converted = tmp_path / "own" / "converted" / "file-123"
    converted.mkdir(parents=True)
    (converted / "config.json").write_text("{}")
    found = json.loads(headstart("models", "--json").stdout)
    assert [m["name"] for m in found["builtin"]] == ["smollm2"] and not found["builtin"][0]["fetched"]
    assert found["converted"] == [{"name": "file-123", "size": 2, "path": str(converted)}]
    assert [(m["name"], m["size"]) for m in found["hub"]] == [("owner/name", 9)]
    table = headstart("models").stdout
    assert "owner/name" in table and str(converted) in table


def _fake_hub(repo: Path) -> None:
    commit = "0" * 40
    for name in ("snapshots/" + commit, "refs", "blobs"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs" / "abc").write_text('{"a": 12}')
    (repo / "snapshots" / commit / "config.json").symlink_to(repo / "blobs" / "abc")


# ------------------------------------------------------------------ colours
def test_pieces_say_which_characters_were_drafted() -> None:
    painter = Painter(lambda ids: "".join(f"<{i}>" for i in ids))
    assert painter.pieces(Chunk("<1>", [1], [False])) == [("<1>", False)]
    assert painter.pieces(Chunk("<2><3><", [2, 3, 4], [True, True, False])) == [
        ("<2>", True),
        ("<3>", True),
        ("<", False),
    ]
    assert painter.pieces(Chunk("4>tail", [], [])) == [("4>", False), ("tail", False)]  # what was held back comes later


def test_pieces_of_a_character_in_two_tokens() -> None:
    raw = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:]}
    painter = Painter(lambda ids: b"".join(raw[i] for i in ids).decode(errors="replace"))
    assert painter.pieces(Chunk("a", [1, 2], [False, False])) == [("a", False)]
    assert painter.pieces(Chunk("é", [3], [True])) == [("é", True)]


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert visible("a\x1b[31mb\tc\nd\x9b") == "a␛[31mb\tc\nd\ufffd"


# ------------------------------------------------------------------ the built-in model
@pytest.mark.real
def test_the_built_in_model_answers() -> None:
    result = headstart("generate", "Repeat: one two three four five", "--json", "--max-tokens", "8", "-d", "ngram")
    found = json.loads(result.stdout)
    assert found["model"] == "smollm2" and "two" in found["completions"][0]["text"].lower()
