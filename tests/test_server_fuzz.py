"""The server against requests that nobody should send: each is refused in one sentence or answered, and nobody else notices."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import LLM
from headstart.server.app import ServerSettings, create_app
from headstart.server.protocol import ChatAsked, CompletionAsked
from headstart.server.run import on_thread
from tests import tiny

PATIENCE = 60  # seconds: who waits longer waits forever
BODY = 1 << 20  # bytes that the server takes
TEXT, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
PROMPT = {"prompt": "the quick brown fox", "max_tokens": 2}
HELLO = [{"role": "user", "content": "hello"}]
TALK = {"messages": HELLO, "max_tokens": 2}
HALF = "\ud800"  # of a character that takes two


# ------------------------------------------------------------------ the server, and who asks it
@dataclass
class Served:
    llm: LLM
    app: FastAPI
    port: int

    def ask(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> Answer:
        """On a connection of its own, as one that broke may take the next request with it."""
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        told = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        with contextlib.closing(line):
            line.request(method, path, data, {k: v for k, v in told.items() if v})
            got = line.getresponse()
            return Answer(got.status, dict(got.getheaders()), got.read().decode())

    def raw(self, *pieces: bytes, ends: bool = True) -> str:
        """What comes back for these bytes, until the server hangs up."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as line, contextlib.suppress(ConnectionError):
            for piece in pieces:
                line.sendall(piece)
            if ends:
                with contextlib.suppress(OSError):  # the server was quicker
                    line.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: line.recv(1 << 16), b"")).decode(errors="replace")
        return ""

    def is_well(self) -> None:
        """Everybody has left, nothing is lost, and the next one is served."""
        answer = self.ask(TEXT, PROMPT)
        assert answer.status == 200, answer
        gate, engine, end = self.app.state.gate, self.llm.engine, time.monotonic() + PATIENCE
        while (gate.inside or not engine.idle) and time.monotonic() < end:
            time.sleep(0.002)
        assert gate.inside == 0 and not engine.scheduler.running and not engine.scheduler.waiting
        engine.check_integrity()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def message(self) -> str:
        """The one sentence of a refusal."""
        told = json.loads(self.text)
        assert told.keys() == {"error"} and told["error"].keys() == {"message", "type", "param", "code"}, told
        message = told["error"]["message"]
        assert message.strip() == message != "" and "\n" not in message and "Traceback" not in message
        return message

    def is_fine(self) -> bool:
        """Refused in one sentence, or a whole answer; True where it was answered."""
        assert 200 <= self.status < 500, (self.status, self.text[:500])
        assert "Traceback" not in self.text
        if self.status >= 400:
            return self.message == ""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in self.text.split("\n") if line]
            assert events[-1] == "[DONE]"
            assert all("error" not in json.loads(event) for event in events[:-1]), events
        else:
            json.loads(self.text)
        return True


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model = tiny.with_tools("<tool_call>{{ tools | tojson }}")
    with LLM(model, speculative={"method": "ngram"}, max_num_seqs=8) as llm:
        app = create_app(llm, ServerSettings("tiny", max_queue=4, max_output_tokens=4, max_body=BODY))
        with on_thread(app, log_level="critical") as (_, url):
            yield Served(llm, app, int(url.rsplit(":", 1)[1]))


@pytest.fixture(autouse=True)
def _afterwards(served) -> Iterator[None]:
    yield
    served.is_well()


# ------------------------------------------------------------------ bodies that are no requests
def nested(depth: int, inside: str = "") -> str:
    return "[" * depth + inside + "]" * depth


def deep(name: str, depth: int) -> str:
    """An object in an object in an object."""
    return f'{{"{name}":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"\0", b"{", b"}", b"[", b"null", b"true", b"1", b'"prompt"', b"[]", b"{}", b"{} {}", b"{'prompt': 'x'}",
        b'{"prompt": "x",}', b'{"prompt": "x" "n": 1}', b'{"prompt": "\0"}', b'{"prompt": "\\x"}', b'{"prompt": "\\ud8"}',
        b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "x"', b"//", b"<xml/>", b"prompt=x",
        b"\x1f\x8b", b'{"prompt": "x", "n": 01}', b'{"prompt": "x", "n": 1e}',
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"prompt":' * 50_000, nested(5_000).encode(),
        nested(100_000).encode(), b'{"prompt": ' + nested(900).encode() + b"}",
        b'{"prompt": ' + nested(5_000, '"x"').encode() + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
def test_what_is_no_request_is_refused(served, path: str, body: bytes) -> None:
    answer = served.ask(path, body)
    assert answer.status == 400 and answer.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "prompt": "the fox", "max_tokens": 2, "max_tokens": 1}',
        b'\xef\xbb\xbf{"prompt": "the fox"}',
        '{"prompt": "the fox"}'.encode("utf-16"),
        b'{"prompt": "\\u0000\\u0007\\uffff\\ud83d\\ude00"}',
        b'{"prompt": "the fox", "user": ' + deep("a", 900).encode() + b"}",
        b'{"prompt": "the fox", "metadata": 1e999, "store": NaN}',
        b'{"prompt": "the fox", "temperature": null, "seed": -' + b"9" * 4000 + b"}",
    ],
)
def test_what_is_odd_and_means_something_is_answered(served, body: bytes) -> None:
    assert served.ask(TEXT, body).is_fine()


@pytest.mark.parametrize(
    "kind",
    [
        "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "multipart/form-data; boundary=x",
        "x", "application/json; charset=utf-16", "application/jsonp", "application/problem+json", ";;;",
        "application/json,text/html",
    ],
)  # fmt: skip
def test_content_types_that_do_not_fit(served, kind: str) -> None:
    served.ask(TEXT, PROMPT, content_type=kind).is_fine()
    assert served.ask(TEXT, b"prompt=x", content_type=kind).status == 400


def test_bodies_beyond_the_limit_announced_or_not(served) -> None:
    body = json.dumps(PROMPT | {"user": "x" * BODY}).encode()
    assert served.ask(TEXT, body).status == 413 and served.ask(TEXT, body).message
    line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    with contextlib.closing(line):
        pieces = (body[i : i + 50_000] for i in range(0, len(body), 50_000))
        with contextlib.suppress(ConnectionError):  # it need not listen to all of it
            line.request("POST", TEXT, pieces, {"content-type": "application/json"}, encode_chunked=True)
        got = line.getresponse()
        assert got.status == 413 and "bytes" in json.loads(got.read())["error"]["message"]


def test_a_million_mistakes_are_one(served) -> None:
    """All of them would take minutes and gigabytes to tell."""
    for wrong in ("null", "{}", "[null]", "[[]]"):
        many = f"[{','.join([wrong] * 120_000)}]"
        for path, body in ((TEXT, '{"prompt": %s}'), (CHAT, '{"messages": %s}'), ("/detokenize", '{"tokens": %s}')):
            assert served.ask(path, (body % many).encode()).status == 400
    assert served.ask(TEXT, PROMPT | {"x" * (BODY // 2): 1}).status == 400
    assert served.ask(TEXT, PROMPT | {f"x{i}": 1 for i in range(30_000)}).status == 400


# ------------------------------------------------------------------ values
BIG, DIGITS = 2**80, int("9" * 4000)
FAR = json.loads("1e999")


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": HALF}, {"prompt": ["a", HALF]}, {"prompt": []}, {"prompt": ""}, {"prompt": ["a", ""]}, {"prompt": [[]]},
        {"prompt": [[1], []]}, {"prompt": None}, {"prompt": [None]}, {"prompt": {}}, {"prompt": 5}, {"prompt": [1.5]},
        {"prompt": [1, "a"]}, {"prompt": [-1]}, {"prompt": [400]}, {"prompt": [BIG]}, {"prompt": [DIGITS]},
        {"prompt": [[1], "a"]}, {"prompt": [-1], "echo": True}, {"prompt": [1] * 5000}, {"prompt": ["a"] * 5000},
        {"prompt": "the " * 5000}, {"n": 0}, {"n": -1}, {"n": 257}, {"n": BIG}, {"n": -BIG}, {"n": DIGITS}, {"n": FAR},
        {"n": 1.5}, {"n": "x"}, {"n": [1]}, {"max_tokens": 0}, {"max_tokens": -BIG}, {"max_tokens": FAR},
        {"max_tokens": "many"}, {"max_tokens": {}}, {"min_tokens": -1}, {"min_tokens": BIG}, {"temperature": -1},
        {"temperature": FAR}, {"temperature": -FAR}, {"temperature": FAR - FAR}, {"temperature": DIGITS}, {"top_p": 0},
        {"top_p": 1.1}, {"top_p": FAR - FAR}, {"min_p": -0.1}, {"typical_p": 0}, {"top_k": -2}, {"repetition_penalty": 0},
        {"presence_penalty": 3}, {"frequency_penalty": FAR}, {"seed": 0.5}, {"seed": FAR}, {"logprobs": -1},
        {"logprobs": 21}, {"logprobs": BIG}, {"prompt_logprobs": -1}, {"logit_bias": []}, {"logit_bias": {"": 1}},
        {"logit_bias": {"x": 1}}, {"logit_bias": {"-3": 1}}, {"logit_bias": {"400": 1}}, {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"3": FAR}}, {"logit_bias": {"3": None}}, {"logit_bias": {HALF: 1}},
        {"logit_bias": {str(i): 0 for i in range(2000)}}, {"stop": ""}, {"stop": [""]}, {"stop": {}}, {"stop": [{}]},
        {"stop": ["x"] * 17}, {"stop": HALF}, {"stop_token_ids": [-5]}, {"stop_token_ids": ["x"]},
        {"stop_token_ids": [1] * 65}, {"bad_words": [""]}, {"bad_words": [HALF]}, {"bad_words": "x" * 9},
        {"stream": "perhaps"}, {"stream_options": []}, {"stream_options": {"x": 1}}, {"best_of": 5}, {"suffix": "x"},
        {"echo": 5}, {"model": "../../etc/passwd"}, {"model": "tiny\0"}, {"model": HALF}, {"model": 1}, {"model": ["tiny"]},
        {"model": "\r\n"}, {"request_id": ""}, {"request_id": "a\r\nb: c"}, {"request_id": "a\n"}, {"request_id": "é"},
        {"request_id": "a" * 129}, {"speculative": "nonsense"}, {"speculative": {"max_tokens": -1}},
        {"speculative": {"verification": "x"}}, {"speculative": 5}, {"speculative": []}, {"speculative": {"method": HALF}},
        {"speculative": {HALF: 1}}, {HALF: 1}, {"temprature": 1}, {"": 1}, {"return_token_ids": "x"}, {"metrics": []},
        {"show_drafts": True, "stream": False},
    ],
    ids=lambda more: ascii(more)[:40],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(served, more: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = served.ask(TEXT, PROMPT | {"stream": stream} | more)
        assert 400 <= answer.status < 500 and answer.message, answer


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": BIG}, {"max_tokens": DIGITS}, {"seed": BIG}, {"seed": -1}, {"seed": -BIG, "n": 3}, {"top_k": BIG},
        {"stop_token_ids": [BIG]}, {"stop": "a" * 100_000}, {"stop": "\0"}, {"bad_words": [" ", "\0", "a" * 2000]},
        {"temperature": 1e-300}, {"temperature": 1e4}, {"temperature": 1.1e-5, "logprobs": 5}, {"top_p": 1e-320},
        {"min_p": 1}, {"typical_p": 1e-320}, {"repetition_penalty": 1e-300, "logprobs": 5},
        {"repetition_penalty": 1e4, "logprobs": 20}, {"logit_bias": {}}, {"logit_bias": {"5": 1e9}, "logprobs": 20},
        {"logit_bias": {str(i): -1e9 for i in range(400)}},
        {"logit_bias": {str(i): -1e9 for i in range(390)}, "logprobs": 20}, {"speculative": {"max_tokens": BIG}},
        {"prompt": [True, False]}, {"prompt": "\0"}, {"prompt": "\U0010ffff"}, {"model": ""}, {"request_id": "~" * 128},
        {"structured_outputs": {"choice": ["yes", "no"]}, "logprobs": 20}, {"n": 8, "stream": True, "show_drafts": True},
        {"prompt": [5], "prompt_logprobs": 1},
        {"prompt": [5], "echo": True, "logprobs": 0},
    ],
    ids=lambda more: ascii(more)[:40],
)  # fmt: skip
def test_values_at_the_edge_are_answered(served, more: dict[str, Any]) -> None:
    assert served.ask(TEXT, PROMPT | more).is_fine()


@pytest.mark.parametrize(
    "more",
    [
        {"model": "x" * 9999},
        {"n": DIGITS},
        {"logit_bias": {"x" * 9999: 1}},
        {"structured_outputs": {"regex": "(" * 9999}},
    ],
    ids=lambda more: str(more)[:20],
)
def test_a_refusal_is_short(served, more: dict[str, Any]) -> None:
    assert len(served.ask(TEXT, PROMPT | more).message) < 1000


# ------------------------------------------------------------------ forms
AB = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "form",
    [
        {}, {"regex": None}, {"regex": False}, {"regex": 5}, {"regex": {}}, {"regex": "("}, {"regex": "[a"},
        {"regex": "(a)\\1"}, {"regex": "(?=a)b"}, {"regex": "(" * 10_000 + ")" * 10_000}, {"regex": HALF},
        {"regex": "a", "choice": ["b"]}, {"choice": []}, {"choice": [""]}, {"choice": [1]}, {"choice": {}}, {"choice": "a"},
        {"choice": [["a"]]}, {"choice": [HALF]}, {"grammar": ""}, {"grammar": "start: nothing"}, {"grammar": "::="},
        {"grammar": "root ::= x"}, {"grammar": []}, {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
        {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, {"grammar": "start: %json {"},
        {"grammar": "%import no.such\nstart: such"}, {"grammar": HALF}, {"json_object": 1}, {"json_object": {}},
        {"json": []}, {"json": True}, {"json": "{"}, {"json": "null"}, {"json": {"type": "x"}}, {"json": {"not": {}}},
        {"json": {"$ref": "#/nowhere"}}, {"json": {"$ref": "http://127.0.0.1:1/x"}},
        {"json": {"$ref": "file:///etc/passwd"}}, {"json": {"enum": []}}, {"json": {"const": FAR}},
        {"json": {"pattern": "(", "type": "string"}}, {"json": {"const": HALF}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}}, {"json": {"type": "integer", "multipleOf": 0}},
        {"json": json.loads(deep("items", 300))}, {"jsno": {}}, {HALF: 1},
        {"json": {"allOf": [{"anyOf": [{"minimum": i}, {"minLength": i}]} for i in range(12)]}}, {"whitespace_pattern": 1},
        {"regex": r"[^\s\S]"}, {"grammar": "start: start"},
        {"grammar": 'start: start "a"'}, {"json": {"$ref": "#"}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"json": {"allOf": [{"$ref": "#"}]}}, {"json": {"anyOf": [{"$ref": "#"}]}},
        {"choice": [str(i) for i in range(3000)]},
    ],
    ids=lambda form: ascii(form)[:50],
)  # fmt: skip
def test_forms_that_no_answer_can_have_are_refused(served, form: dict[str, Any]) -> None:
    answer = served.ask(TEXT, PROMPT | {"structured_outputs": form})
    assert answer.status == 400 and answer.message, answer


@pytest.mark.parametrize(
    "form",
    [
        {"regex": ""}, {"regex": "(a+)+$"}, {"regex": "(a|a)*b"}, {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(.*x.*){50}"}, {"regex": "(a|b)*a(a|b){200}"}, {"regex": r"\p{L}{0,10000}"},
        {"regex": "(" * 200 + "a" + ")" * 200}, {"choice": ["\0", "😀"]}, {"grammar": 'start: x\nx: x x | "a" | ""'},
        {"json": {}}, {"json": {"$ref": "#/$defs/a", "$defs": {"a": AB}}}, {"json": {"type": "string", "minLength": 10**9}},
        {"json": {"type": "array", "minItems": 10**9, "items": {"type": "null"}}}, {"choice": ["a"], "regex": False},
    ],
    ids=lambda form: ascii(form)[:50],
)  # fmt: skip
def test_forms_that_go_on_forever_cost_no_more_than_others(served, form: dict[str, Any]) -> None:
    assert served.ask(TEXT, PROMPT | {"structured_outputs": form}).is_fine()


@pytest.mark.parametrize(
    "form",
    [
        [], "json", {"type": "x"}, {"type": "regex"}, {"type": "grammar"}, {"type": "json_schema"},
        {"type": "json_schema", "regex": "a"}, {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": "x"}}, {"type": "regex", "regex": 5},
        {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}, {"type": "text", "x": 1}, {"type": None},
    ],
    ids=ascii,
)  # fmt: skip
def test_response_formats_that_are_none(served, form: Any) -> None:
    answer = served.ask(CHAT, TALK | {"response_format": form})
    assert answer.status == 400 and answer.message


# ------------------------------------------------------------------ chat
def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} | more]}


def called(calls: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]}


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "go", "parameters": parameters} | more}]}


LOOK = tool({"type": "object", "properties": {}})
MUST = {"tool_choice": "required"}


@pytest.mark.parametrize(
    "more",
    [
        {"messages": []}, {"messages": {}}, {"messages": "hello"}, {"messages": ["hello"]}, {"messages": [None]},
        {"messages": [[]]}, {"messages": [{}]}, {"messages": [{"content": "x"}]},
        {"messages": [{"role": None, "content": "x"}]}, {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": HALF, "content": "x"}]}, said(HALF), said(["x"]), said([None]), said([{}]),
        said([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), said([{"type": ["text"]}]),
        said([{"type": "text", "text": HALF}]), said("x" * 100_000), called(5), called("x"), called({"a": 1}),
        called([{HALF: 1}]), {"tools": {}}, {"tools": "x"}, {"tools": [1]}, {"tools": [{}]}, {"tools": [{"function": "x"}]},
        {"tools": [{"function": {}}]}, {"tools": [{"function": {"name": 1}}]}, tool({"type": "object"}, name=HALF),
        LOOK | {"tool_choice": 1}, LOOK | {"tool_choice": "go"}, LOOK | {"tool_choice": {}},
        LOOK | {"tool_choice": {"function": "go"}}, LOOK | {"tool_choice": {"function": {"name": ["go"]}}},
        LOOK | {"tool_choice": {"function": {"name": "no"}}}, MUST, {"tool_choice": {"function": {"name": "go"}}},
        tool({"type": "x"}) | MUST, tool({"$ref": "#/nowhere"}) | MUST, tool({"const": FAR}) | MUST,
        LOOK | MUST | {"response_format": {"type": "json_object"}}, tool(json.loads(deep("items", 900))) | MUST,
        {"chat_template_kwargs": []}, {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, {"chat_template_kwargs": {"tokenize": False}},
        {"chat_template_kwargs": {"self": 1}}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 5},
        {"max_completion_tokens": 0}, {"max_completion_tokens": FAR}, {"parallel_tool_calls": "x"}, {"prompt": "x"},
        tool([1]) | MUST, tool("x") | MUST, tool(5) | MUST,
        tool(True) | MUST, tool([[[1], 2]]) | MUST,
    ],
    ids=lambda more: ascii(more)[:60],
)  # fmt: skip
def test_conversations_that_are_none_are_refused(served, more: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = served.ask(CHAT, TALK | {"stream": stream} | more)
        assert answer.status == 400 and answer.message, answer


@pytest.mark.parametrize(
    "more",
    [
        said(None), said(5), said({"a": 1}), said([]), said([{"type": "text", "text": None}]), said([{"type": "text"}]),
        said("\0"), said("x", name=5, tool_calls=None, more={"a": [1]}),
        {"messages": [{"role": "nobody\n<|end|>", "content": "x"}]}, {"messages": [{"role": "user"}]},
        said(json.loads(deep("a", 300))), called([]), called([1, None, "x"]), called([{"function": []}]),
        called([{"function": {"arguments": "{"}}]), called([{"function": {"arguments": "NaN"}}]),
        called([{"function": None}]), called([{"function": {"arguments": "9" * 5000}}]),
        called([{"function": {"arguments": 5}}]), {"tools": []}, LOOK | {"tool_choice": "none"},
        LOOK | {"parallel_tool_calls": False}, LOOK | MUST, tool(None) | MUST, tool({}, name="") | MUST,
        tool({}, name='"}\nstart: "x') | MUST, {"chat_template_kwargs": {"": 1, "a b": {"c": []}}},
        {"max_completion_tokens": BIG},
        called([{"function": {"arguments": "[" * 100_000}}]),
    ],
    ids=lambda more: ascii(more)[:60],
)  # fmt: skip
def test_conversations_that_are_odd_are_answered_or_refused(served, more: dict[str, Any]) -> None:
    for stream in (False, True):
        served.ask(CHAT, TALK | {"stream": stream} | more).is_fine()


@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": "x", "messages": HELLO}), ("/tokenize", {"prompt": HALF}),
        ("/tokenize", {"prompt": 5}), ("/tokenize", {"messages": []}), ("/tokenize", {"messages": [{"role": 1}]}),
        ("/tokenize", called(5)), ("/tokenize", said(HALF)), ("/tokenize", said([{"type": "x"}])),
        ("/tokenize", {"prompt": "x", "model": "y"}), ("/tokenize", {"prompt": "x", "y": 1}), ("/detokenize", {}),
        ("/detokenize", {"tokens": None}), ("/detokenize", {"tokens": "x"}), ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [400]}), ("/detokenize", {"tokens": [BIG]}), ("/detokenize", {"tokens": [0.5]}),
    ],
)  # fmt: skip
def test_texts_and_tokens_that_are_none(served, path: str, body: dict[str, Any]) -> None:
    answer = served.ask(path, body)
    assert 400 <= answer.status < 500 and answer.message


# ------------------------------------------------------------------ drawn
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec=None), max_size=8)
)  # fmt: skip
VALUES = st.recursive(
    LEAVES
    | st.sampled_from(["tiny", "the", 10**30, [[5, 6]], {"type": "text", "text": "x"}, "required", "json_object"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def other_fields(asked: type) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted({*asked.model_fields, "user", "speculativ"})  # type: ignore[attr-defined]
    return st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=2)


@settings(max_examples=60)
@given(more=other_fields(CompletionAsked))
def test_whatever_fields_hold_it_is_answered_or_refused(served, more: dict[str, Any]) -> None:
    served.ask(TEXT, PROMPT | more).is_fine()


@settings(max_examples=60)
@given(more=other_fields(ChatAsked))
def test_whatever_fields_of_a_chat_hold_it_is_answered_or_refused(served, more: dict[str, Any]) -> None:
    served.ask(CHAT, TALK | more).is_fine()


WHOLE = json.dumps(PROMPT | {"stop": ["a", "é"], "logit_bias": {"3": -1.5}, "stream": False}).encode()


@settings(max_examples=60)
@given(at=st.integers(0, len(WHOLE)), gone=st.integers(0, 6), new=st.binary(max_size=6))
def test_whatever_was_cut_out_and_put_in_it_is_answered_or_refused(served, at: int, gone: int, new: bytes) -> None:
    served.ask(TEXT, WHOLE[:at] + new + WHOLE[at + gone :]).is_fine()


# ------------------------------------------------------------------ paths, methods, headers
@pytest.mark.parametrize(
    "path",
    [
        "/nothing", "/v1", "/v1/completion", "/v1/completions/x", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
        "/page/../app.py", "/v1/../../openapi.py", "//etc/passwd", "/..%2f..%2fetc%2fpasswd", "/%00", "/%ff%fe",
        "/page.js%00.html", "/v1/models%0d%0ax:%20y", "/" + "a" * 30_000, "/?" + "a=b&" * 5000, "/health/../metrics/..",
    ],
    ids=lambda path: path[:40],
)  # fmt: skip
def test_there_is_nothing_where_nothing_should_be(served, path: str) -> None:
    for method in ("GET", "POST"):
        answer = served.ask(path, method=method)
        assert answer.status in (404, 405) or path.startswith("/?"), answer
        assert "root:" not in answer.text and (answer.status == 200 or answer.message)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "post"])
def test_other_methods_are_refused(served, method: str) -> None:
    for path in (TEXT, CHAT, "/tokenize"):
        answer = served.ask(path, PROMPT, method)
        assert (answer.status == 405 and answer.message) or (answer.status == 400 and method in ("BREW", "post"))


def test_a_405_says_which_methods_there_are(served) -> None:
    assert "POST" in served.ask(TEXT, method="GET").headers.get("allow", "")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "x" * 30_000}, {"authorization": "Bearer \xff"}, {"accept": "image/png"},
        {"accept_encoding": "x"}, {"traceparent": "00-" + "z" * 50}, {"traceparent": "\xff"}, {"x_request_id": "é" * 100},
        {"host": "elsewhere:99999"}, {"origin": "null"}, {"cookie": "a=b; " * 2000}, {"expect": "the unexpected"},
        {"connection": "close, keep-alive"}, {"range": "bytes=0-0"}, {"if_none_match": "*"},
        {"te": "trailers"},
    ],
    ids=lambda headers: ascii(headers)[:40],
)  # fmt: skip
def test_headers_that_mean_nothing_here(served, headers: dict[str, str]) -> None:
    assert served.ask(TEXT, PROMPT, **headers).is_fine()


def test_who_comes_too_late_is_told_when_to_come_back(served) -> None:
    gate = served.app.state.gate
    gate.inside = gate.most
    full = [served.ask(path, body) for path, body in ((TEXT, PROMPT), (CHAT, TALK | {"stream": True}))]
    gate.inside, gate.closing = 0, True
    closed = [served.ask(path, body) for path, body in ((TEXT, PROMPT), (CHAT, TALK | {"stream": True}))]
    ready = served.ask("/ready", method="GET")
    gate.closing = False
    assert [a.status for a in full + closed] == [429, 429, 503, 503] and ready.status == 503
    assert all(a.message and int(a.headers["retry-after"]) > 0 for a in full + closed)


# ------------------------------------------------------------------ sockets
def request(body: Any = PROMPT, *lines: bytes, path: str = TEXT) -> bytes:
    data = json.dumps(body).encode()
    head = [b"POST %s HTTP/1.1" % path.encode(), b"host: x", b"content-type: application/json", *lines]
    return b"\r\n".join([*head, b"content-length: %d" % len(data), b"", data])


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 100, b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET /health\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
        b"GET  /health  HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\na\0b: c\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1e3\r\n\r\n" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %s\r\n\r\n" % (TEXT.encode(), b"9" * 5000),
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}{}{}" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n{}" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 10\r\n\r\n" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{" % TEXT.encode(),
        b"POST %s HTTP/1.1\r\nhost: x\r\ncont" % TEXT.encode(), request()[:-1], request(PROMPT | {"stream": True}),
        request(PROMPT, b"upgrade: h2c", b"connection: upgrade"), request() + b"GET", request() + b"\0" * 1000,
    ],
    ids=lambda sent: ascii(sent[-40:]),
)  # fmt: skip
def test_bytes_that_are_no_http_end_quickly(served, sent: bytes) -> None:
    """And half a request whose sender says no more. Below the app nobody knows OpenAI's shape, so a status is enough."""
    got = served.raw(sent)
    assert got == "" or got.startswith("HTTP/1.1 4") or got.startswith(("HTTP/1.1 200", "HTTP/1.1 100")), got[:500]
    assert "Traceback" not in got and " 500 " not in got


def test_requests_behind_each_other_are_answered_in_order(served) -> None:
    several = [request(PROMPT | {"request_id": f"number-{i}"}) for i in range(3)] + [
        request({"prompt": 5}, b"connection: close")
    ]
    got = served.raw(b"".join(several), ends=False)
    places = [got.index(f'"id":"number-{i}"') for i in range(3)]
    assert places == sorted(places) and got.count("HTTP/1.1 200") == 3 and got.count("HTTP/1.1 400") == 1


def test_who_leaves_in_the_middle_is_forgotten(served) -> None:
    long = PROMPT | {"max_tokens": 4, "n": 8, "ignore_eos": True}
    for _ in range(5):
        for body in (long, long | {"stream": True}):
            with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as line:
                line.sendall(request(body))


def test_who_is_slow_holds_up_nobody(served) -> None:
    """Headers byte by byte, bodies that never come, answers that nobody reads: the others are served meanwhile."""
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port), PATIENCE)) for _ in range(30)]
        whole = request()
        for i in range(20):
            for line in lines[:15]:
                line.sendall(whole[i : i + 1])
        for line in lines[15:25]:
            line.sendall(whole[:-5])
        for line in lines[25:]:
            line.sendall(request(PROMPT | {"stream": True}))
        for _ in range(3):
            assert served.ask(TEXT, PROMPT).is_fine() and served.ask(MODELS, method="GET").is_fine()
