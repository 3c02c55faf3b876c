"""The server's log: one line for each request, its id on all of them, and nothing that anybody said."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from headstart import LLM
from headstart.server import run
from headstart.server.answers import Answers
from headstart.server.app import ServerSettings, create_app
from headstart.server.logs import JsonForm, TextForm, account, written
from tests import tiny, web
from tests.test_server import MESSAGES, PROMPT, serving

KEY, WRONG, SAID = "sk-nobody-may-see-this", "sk-a-wrong-one", "unspeakable"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny.loaded(), speculative={"method": "ngram"}, max_num_seqs=4) as made:
        yield made


@contextmanager
def logging_server(llm: LLM, level: str = "info", form: str = "json", **settings) -> Iterator[tuple[str, io.StringIO]]:
    """Its URL, and its log, which is whole when the server has gone."""
    to = io.StringIO()
    with written(level, form, to), serving(llm, **settings) as url:
        yield url, to


def read(log: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def of_requests(log: io.StringIO) -> list[dict]:
    return [line for line in read(log) if line["message"] == "request ended"]


# ------------------------------------------------------------------ one line for each request
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_a_line_says_what_the_answer_says(llm, chat: bool, stream: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"max_tokens": 30, "temperature": 0, "n": 2, "structured_outputs": {"regex": "(ab){10}"}, "stream": stream}
    body |= {"messages": MESSAGES} if chat else {"prompt": PROMPT * 2}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    with logging_server(llm) as (url, log):
        got = web.post(url + path, json=body)
    events = [line.removeprefix("data: ") for line in got.text.splitlines() if line.startswith("data: {")]
    told = json.loads(events[-1]) if stream else got.json()
    [line] = of_requests(log)
    assert (line["method"], line["route"], line["status"], line["level"]) == ("POST", path, 200, "info")
    assert line["request_id"] == got.headers["x-request-id"] == told["id"]
    assert line["logger"] == "headstart.server" and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line["time"])
    for name in ("prompt_tokens", "completion_tokens"):
        assert line[name] == told["usage"][name] > 0
    details = told["usage"]["completion_tokens_details"]
    assert line["accepted"] == details["accepted_prediction_tokens"]
    assert line["drafted"] == line["accepted"] + details["rejected_prediction_tokens"] > 0
    assert len(line["finish_reasons"]) == 2 and set(line["finish_reasons"]) <= {"stop", "length"}
    assert 0 < line["seconds_to_first_token"] <= line["seconds"]


def test_an_id_of_the_clients_own(llm) -> None:
    with logging_server(llm) as (url, log):
        got = web.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "request_id": "mine-7"})
    assert got.headers["x-request-id"] == got.json()["id"] == of_requests(log)[0]["request_id"] == "mine-7"


@pytest.mark.parametrize(
    "path, body, key, status",
    [
        ("completions", "{", KEY, 400),
        ("completions", {"prompt": PROMPT, "temperature": -1, "request_id": "mine-8"}, KEY, 400),
        ("completions", {"prompt": PROMPT, "model": "gpt-4"}, KEY, 404),
        ("completions", {"prompt": PROMPT}, WRONG, 401),
        ("nothing", {}, KEY, 404),
    ],
)
def test_who_is_refused_has_a_line_and_an_id_too(llm, path: str, body, key: str, status: int) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with logging_server(llm, keys=[KEY]) as (url, log):
        got = web.post(f"{url}/v1/{path}", content=content, headers=headers)
    [line] = of_requests(log)
    assert line["status"] == got.status_code == status and "completion_tokens" not in line
    assert line["request_id"] == got.headers["x-request-id"] != ""
    assert "request_id" not in content or line["request_id"] == "mine-8"


def test_looking_is_told_only_when_all_is_told_or_when_it_goes_wrong(llm) -> None:
    for level, routes in (("info", ["/v1/models"]), ("debug", ["/health", "/metrics", "/v1/models"])):
        with logging_server(llm, level, keys=[KEY]) as (url, log):
            web.get(f"{url}/health")
            web.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"})
            assert web.get(f"{url}/v1/models").status_code == 401
        assert [line["route"] for line in of_requests(log)] == routes


def test_who_leaves_early_is_told_so(llm) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    with logging_server(llm) as (url, log):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as s:
            head = b"host: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            s.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + body)
            assert b"200 OK" in s.recv(4096)
    [line] = of_requests(log)
    assert line["finish_reasons"] == ["abort"] and line["status"] == 200 and 0 < line["completion_tokens"] < 400


# ------------------------------------------------------------------ ids
def test_every_line_carries_the_id_of_its_request(llm, monkeypatch) -> None:
    """Also those of threads and tasks that a request began, while others run."""
    whole, other = Answers.whole, logging.getLogger("headstart.elsewhere")

    async def chatty(self, order):
        other.info("begun", extra={"fields": {"own": order.asked.id}})
        await asyncio.sleep(0.02)
        await asyncio.to_thread(other.info, "in a thread", extra={"fields": {"own": order.asked.id}})
        task = asyncio.create_task(whole(self, order))
        other.info("waits", extra={"fields": {"own": order.asked.id}})
        return await task

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(timeout=web.PATIENCE) as client:
            asks = [{"prompt": PROMPT, "max_tokens": 3, "request_id": f"r{i}"} for i in range(6)]
            await asyncio.gather(*[client.post(f"{url}/v1/completions", json=body) for body in asks])

    monkeypatch.setattr(Answers, "whole", chatty)
    with logging_server(llm) as (url, log):
        asyncio.run(ask(url))
    lines = [line for line in read(log) if line["logger"] == "headstart.elsewhere"]
    assert len(lines) == 18 and all(line["request_id"] == line["own"] for line in lines)
    assert {line["request_id"] for line in lines} == {f"r{i}" for i in range(6)}
    assert account().id == "", "outside of requests there is none"


def test_what_breaks_is_found_by_its_id(llm, monkeypatch) -> None:
    async def broken(self, order):
        raise RuntimeError("a wheel came off")

    monkeypatch.setattr(Answers, "whole", broken)
    with logging_server(llm) as (url, log):
        got = web.post(f"{url}/v1/completions", json={"prompt": PROMPT})
    assert got.status_code == 500 and "wheel" not in got.text
    lines = [line for line in read(log) if line.get("request_id") == got.headers["x-request-id"]]
    assert [line["status"] for line in lines if line["message"] == "request ended"] == [500]
    assert any(line["level"] == "error" and "a wheel came off" in line["exception"] for line in lines)


# ------------------------------------------------------------------ what is in no line
@pytest.mark.parametrize("form", ["json", "text"])
def test_neither_keys_nor_texts_nor_headers_are_logged(llm, form: str) -> None:
    prompt = f"{SAID} {PROMPT}"
    asks = [
        ("completions", {"prompt": prompt, "max_tokens": 8, "echo": True}),
        ("completions", {"prompt": prompt, "max_tokens": 8, "stream": True}),
        ("completions", {"prompt": prompt * 300}),
        ("completions", {"prompt": prompt, SAID: SAID}),
        ("chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8}),
        ("chat/completions", {"messages": [{"role": SAID, "content": [{"type": SAID}]}]}),
    ]
    with logging_server(llm, "debug", form, keys=[KEY]) as (url, log):
        for path, body in asks:
            for key in (KEY, WRONG):
                headers = {"authorization": f"Bearer {key}", "x-own": SAID, "cookie": SAID}
                web.post(f"{url}/v1/{path}?key={KEY}", json=body, headers=headers)
    text = log.getvalue()
    assert text.count("request ended") == 2 * len(asks)
    for secret in (KEY, WRONG, SAID, "lazy dog", "Bearer"):
        assert secret not in text


# ------------------------------------------------------------------ how lines look
def test_text_is_for_people(llm) -> None:
    with logging_server(llm, form="text") as (url, log):
        got = web.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
    [line] = log.getvalue().splitlines()
    time_, level, logger, name, rest = line.split(" ", 4)
    assert (level, logger, name) == ("info", "headstart.server", f"[{got.json()['id']}]") and time_.endswith("Z")
    assert rest.startswith("request ended method=POST route=/v1/completions status=200 prompt_tokens=")
    assert " completion_tokens=4 finish_reasons=length " in rest


def test_a_path_cannot_pretend_to_be_a_line(llm) -> None:
    with logging_server(llm, form="text") as (url, log):
        web.post(f"{url}/x%0a2026-01-01T00:00:00Z%20error%20forged%1b[31m")
    assert len(log.getvalue().splitlines()) == 1 and "\x1b" not in log.getvalue()


@pytest.mark.parametrize("form", [TextForm(), JsonForm()])
def test_messages_stay_on_their_line_and_tracebacks_are_kept(form: logging.Formatter) -> None:
    try:
        raise ValueError("inside")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, "one\ntwo \x1b[1m%s", ("three",), info)
    text = form.format(record)
    if isinstance(form, JsonForm):
        told = json.loads(text)
        assert "\n" not in text and told["message"] == "one\ntwo \x1b[1mthree" and "inside" in told["exception"]
    else:
        first, *below = text.splitlines()
        assert first.endswith(r"error uvicorn.error one\ntwo \x1b[1mthree") and below[-1] == "ValueError: inside"


def test_uvicorn_speaks_in_the_same_form(llm, monkeypatch) -> None:
    """As `headstart serve` runs it: from the first line to the last."""
    made: list[run.Server] = []

    class Kept(run.Server):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(run, "Server", Kept)
    for name in ("uvicorn", "uvicorn.error"):  # servers of other tests may have set these up
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    address, log = run.Address(port=0), io.StringIO()
    door = address.bind()
    app = create_app(llm, ServerSettings("tiny"))
    with written("info", "json", log):
        thread = threading.Thread(target=run.serve, args=(app, address, door, 2.0, "info"))
        thread.start()
        while not (made and made[0].started):
            time.sleep(0.01)
        port = door.getsockname()[1]
        assert web.post(f"http://127.0.0.1:{port}/tokenize", json={"prompt": PROMPT}).status_code == 200
        made[0].should_exit = True
        thread.join(10)
    lines = read(log)
    assert {line["logger"] for line in lines} == {"uvicorn.error", "headstart.server"}
    told = " ".join(line["message"] for line in lines)
    assert told.startswith("listening at http://127.0.0.1:") and "Finished server process" in told
    assert [line["route"] for line in of_requests(log)] == ["/tokenize"]
