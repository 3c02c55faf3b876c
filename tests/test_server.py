"""The server, over real sockets on loopback, asked by OpenAI's own client and by clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest

from headstart import LLM, SamplingParams
from headstart.server.app import ServerSettings, create_app
from headstart.server.gate import Gate, Turns
from headstart.server.run import on_thread
from headstart.server.tools import HERMES, LLAMA, MISTRAL, Call, ToolReader
from tests import tiny, web

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox"
MESSAGES = [{"role": "user", "content": PROMPT}]


def only(properties: dict) -> dict:
    """The schema of an object with these and nothing else."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@contextmanager
def serving(llm: LLM, **settings) -> Iterator[str]:
    """The URL of a server that runs on a thread."""
    app = create_app(llm, ServerSettings("tiny", **settings))
    try:
        with on_thread(app) as (_, url):
            yield url
    finally:
        assert app.state.gate.inside == 0, "everybody has left"
        assert llm.engine.idle and llm.engine.pool.num_used == 0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = tiny.with_tools("<tool_call>{{ tools[0].function.name }}")
    with LLM(model, speculative={"method": "ngram"}, max_num_seqs=8) as made:
        yield made


@pytest.fixture(scope="module")
def url(llm) -> Iterator[str]:
    with serving(llm) as found:
        yield found


@pytest.fixture(scope="module")
def client(url) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def offline(llm: LLM, prompt=PROMPT, **params) -> str:
    return llm.generate(prompt, SamplingParams(**params))[0].text


# ------------------------------------------------------------------ what the page needs
def events(url: str, **body) -> list[dict]:
    with httpx.stream("POST", f"{url}/v1/completions", json={"stream": True} | body, timeout=web.PATIENCE) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_drafts_are_shown_with_the_text_that_came_of_them(llm, url) -> None:
    favoured = {str(t): 20.0 for t in llm.tokenizer.encode(PROMPT)[:2]}  # so it repeats itself, and n-grams are right
    how = dict(max_tokens=40, temperature=0, ignore_eos=True, logit_bias=favoured)
    told = events(url, prompt=PROMPT, show_drafts=True, return_token_ids=True, **how)
    choices = [c for event in told for c in event["choices"]]
    tokens = [t for c in choices for t in c["token_ids"]]
    text = "".join(c["text"] for c in choices)
    assert text == offline(llm, **how)
    shown = [c["speculation"] for c in choices]
    assert "".join(piece for s in shown for piece, *_ in s["pieces"]) == text
    assert [s["step"] for s in shown if s["tokens"]] == list(range(len([s for s in shown if s["tokens"]])))
    places = {(s["step"], i) for s in shown for i in range(len(s["tokens"]))}
    assert {(step, place) for s in shown for _, step, place in s["pieces"]} <= places
    assert sum(len(s["tokens"]) for s in shown) == len(tokens)
    drafted = [s for s in shown if s["draft"]["tokens"]]
    assert any(s["draft"]["accepted"] for s in drafted)
    for s in drafted:
        draft, path = s["draft"], s["draft"]["accepted"]
        assert len(draft["tokens"]) == len(draft["parents"]) == len(draft["origins"])
        assert [draft["parents"][n] for n in path] == [-1, *path][: len(path)], "one path from the root down"
        assert s["tokens"][: len(path)] == [draft["tokens"][n] for n in path]
        assert s["origins"] == ["ngram"] * len(path) + [None] * (len(s["tokens"]) - len(path))


def test_drafts_are_shown_in_streams_alone(url) -> None:
    answer = web.post(f"{url}/v1/completions", json={"prompt": "a", "show_drafts": True})
    assert answer.status_code == 400 and "show_drafts is for stream=true" in answer.json()["error"]["message"]


def test_the_server_tells_what_it_has_done(url) -> None:
    before = web.get(f"{url}/stats").json()
    events(url, prompt=PROMPT, max_tokens=30, temperature=0, ignore_eos=True)
    after = web.get(f"{url}/stats").json()
    assert after["tokens"] == before["tokens"] + 30 and after["steps"] > before["steps"] and after["running"] == 0
    ngram = after["drafters"]["ngram"]
    assert sum(ngram["accepted_by_position"].values()) == ngram["accepted"] <= ngram["drafted"]
    assert after["model"] == "tiny" and after["why"] and after["policy"]["policy"] == "fixed"


def counters(url: str, name: str) -> dict[str, float]:
    lines = [line for line in web.get(f"{url}/metrics").text.splitlines() if line.startswith(f"headstart:{name}{{")]
    return {line.split("{", 1)[1].rsplit("}", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.mark.parametrize(
    "body", [{"prompt": [1] * 100_000}, {"prompt": "a", "speculative": "medusa"}, {"prompt": [10**6]}, {"prompt": ""}]
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_refused_is_no_answer_that_was_left(llm, body: dict, stream: bool) -> None:
    with serving(llm) as url:
        for _ in range(2):
            assert web.post(f"{url}/v1/completions", json=body | {"stream": stream}).status_code == 400
        assert not counters(url, "request_success_total")
        [(labels, count)] = [x for x in counters(url, "http_requests_total").items() if "completions" in x[0]]
        assert 'status="400"' in labels and count == 2


def test_a_client_that_reads_nothing_loses_its_place(llm, monkeypatch) -> None:
    monkeypatch.setattr("headstart.server.wire.STALLED", 0.2)
    with serving(llm) as url:
        port = int(url.rsplit(":", 1)[1])
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            how = {"prompt": [1, 2], "n": 8, "max_tokens": 400, "stream": True, "ignore_eos": True, "logprobs": 20}
            body = json.dumps(how).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            client.sendall(f"{head}\r\n\r\n".encode() + body)
            deadline = time.monotonic() + 60
            while not (ended := counters(url, "http_requests_total")) or not any("completions" in x for x in ended):
                assert time.monotonic() < deadline, "it still holds its place"
                time.sleep(0.1)


def test_what_is_not_done_when_time_is_up_is_told_so(llm, monkeypatch) -> None:
    app = create_app(llm, ServerSettings("tiny"))
    how = {"prompt": [1, 2], "max_tokens": 500, "ignore_eos": True}
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.02), step())[1])  # so that it takes long
    with on_thread(app, drain=0.3) as (server, base), ThreadPoolExecutor() as others:
        url = f"{base}/v1/completions"
        with httpx.stream("POST", url, json=how | {"stream": True}, timeout=web.PATIENCE) as told:
            whole = others.submit(httpx.post, url, json=how, timeout=web.PATIENCE)
            lines = told.iter_lines()
            next(lines)
            while app.state.gate.inside < 2:
                time.sleep(0.01)
            server.should_exit = True
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert "shut down before this answer was complete" in rest[-2]
    assert whole.result().status_code == 503 and "shut down" in whole.result().json()["error"]["message"]
    assert llm.engine.idle and app.state.gate.inside == 0


def test_health_tells_of_an_engine_that_broke() -> None:
    with LLM(tiny.loaded(), max_num_seqs=2) as own, serving(own) as url:
        assert web.get(f"{url}/health").json() == {"status": "ok", "restarts": 0, "last_error": None}
        own._loop.health.restarts, own._loop.health.last_error = 1, "ZeroDivisionError"
        answer = web.get(f"{url}/health")
        assert answer.status_code == 200 and answer.json()["restarts"] == 1
        own._loop.health.alive = False
        answer = web.get(f"{url}/health")
        assert answer.status_code == 503 and answer.json()["status"] == "failed"


def test_the_page_is_whole_and_asks_nobody_else(llm) -> None:
    with serving(llm, keys=["secret"]) as url:
        page = web.get(url)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        for name in ("page.js", "page.css"):
            assert name in page.text and web.get(f"{url}/{name}").status_code == 200
            assert "http://" not in web.get(f"{url}/{name}").text.replace("http://www.w3.org/2000/svg", "")
        assert web.get(f"{url}/stats").status_code == 401, "numbers need a key, the page itself does not"


# ------------------------------------------------------------------ OpenAI's client
def test_completions_are_those_of_the_library(llm, client) -> None:
    out = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0.8, seed=7)
    assert out.choices[0].text == offline(llm, max_tokens=24, temperature=0.8, seed=7)
    assert out.choices[0].finish_reason in ("length", "stop") and out.model == "tiny" and out.id.startswith("cmpl-")
    assert out.usage.prompt_tokens == len(llm.tokenizer.encode(PROMPT)) and out.usage.completion_tokens <= 24
    assert out.usage.total_tokens == out.usage.prompt_tokens + out.usage.completion_tokens


def test_chat_goes_through_the_template(llm, client) -> None:
    out = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=20, temperature=0)
    [same] = llm.chat(MESSAGES, SamplingParams(max_tokens=20, temperature=0))
    assert out.choices[0].message.content == same.text and out.choices[0].message.role == "assistant"
    parts = [
        {"role": "user", "content": [{"type": "text", "text": PROMPT[:20]}, {"type": "text", "text": PROMPT[20:]}]}
    ]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=20, temperature=0)
    assert again.choices[0].message.content == same.text


def test_a_prompt_is_judged_as_evaluations_ask_for_it(llm, client) -> None:
    """As lm-evaluation-harness does: echo, log probabilities, and nothing new."""
    ids = llm.tokenizer.encode(PROMPT)
    how = dict(model="tiny", prompt=PROMPT, temperature=0, echo=True, logprobs=2)
    told = client.completions.create(max_tokens=0, **how).choices[0]
    want = llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2))[0].prompt_logprobs
    assert told.text == PROMPT and told.logprobs.token_logprobs[0] is None and len(told.logprobs.tokens) == len(ids)
    assert told.logprobs.token_logprobs[1:] == pytest.approx([t.logprob for t in want[1:]])
    assert told.logprobs.top_logprobs[0] is None and len(told.logprobs.top_logprobs[1]) == 2
    more = client.completions.create(max_tokens=3, **how, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert more.token_logprobs[: len(ids)] == told.logprobs.token_logprobs and len(more.tokens) == len(ids) + 3
    extra = {"prompt_logprobs": 1}
    own = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, extra_body=extra)
    first, *rest = own.choices[0].prompt_logprobs
    assert first is None and [one[str(t)]["logprob"] for one, t in zip(rest, ids[1:], strict=True)] == pytest.approx(
        [t.logprob for t in want[1:]]
    )


@pytest.mark.parametrize("chat", [True, False])
def test_pieces_add_up_and_end_with_usage(client, chat: bool) -> None:
    how = dict(model="tiny", max_tokens=30, temperature=1.0, seed=5, n=2)
    api = client.chat.completions if chat else client.completions
    what = {"messages": MESSAGES} if chat else {"prompt": PROMPT}
    whole = api.create(**what, **how)
    texts, usage, reasons = ["", ""], None, {}
    for piece in api.create(**what, **how, stream=True, stream_options={"include_usage": True}):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += (choice.delta.content or "") if chat else choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    wanted = [c.message.content if chat else c.text for c in whole.choices]
    assert texts == wanted and texts[0] != texts[1]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert reasons == {c.index: c.finish_reason for c in whole.choices}


def test_many_prompts_in_one_request(llm, client) -> None:
    prompts = [PROMPT, "a stone bridge", "she sells sea shells"]
    out = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0, n=2)
    assert [c.index for c in out.choices] == list(range(6))
    assert [c.text for c in out.choices[::2]] == [offline(llm, p, max_tokens=8, temperature=0) for p in prompts]
    ids = [llm.tokenizer.encode(p) for p in prompts]
    texts = [""] * 3
    for piece in client.completions.create(model="tiny", prompt=ids, max_tokens=8, temperature=0, stream=True):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [c.text for c in out.choices[::2]]


def test_log_probabilities_whole_and_in_pieces(llm, client) -> None:
    how = dict(model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    told = client.chat.completions.create(**how).choices[0].logprobs.content
    [same] = llm.chat(MESSAGES, SamplingParams(max_tokens=6, temperature=0, logprobs=3))
    assert [t.logprob for t in told] == pytest.approx([t.logprob for t in same.logprobs], abs=1e-4)
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob >= t.top_logprobs[-1].logprob for t in told)
    pieces = client.chat.completions.create(**how, stream=True)
    streamed = [t for p in pieces for c in p.choices if c.logprobs for t in c.logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in told]
    more = dict(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, extra_body={"ignore_eos": True})
    old = client.completions.create(**more, logprobs=2).choices[0].logprobs
    assert len(old.tokens) == len(old.token_logprobs) == len(old.top_logprobs) == len(old.text_offset) == 4
    assert old.text_offset == [sum(map(len, old.tokens[:i])) for i in range(4)]
    echoed = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, echo=True).choices[0]
    assert echoed.text == PROMPT + offline(llm, max_tokens=4, temperature=0)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": only({"a": {"enum": [1, 2]}})}},
        {"type": "regex", "regex": r'\{"a": [12]\}'},
        {"type": "grammar", "grammar": 'start: "{\\"a\\": " ("1" | "2") "}"'},
    ],
)  # fmt: skip
def test_answers_have_the_form_that_was_asked_for(client, form) -> None:
    how = dict(model="tiny", messages=MESSAGES, max_tokens=80, temperature=1.0, seed=1)
    for spec in (True, False):
        out = client.chat.completions.create(**how, extra_body={"response_format": form, "speculative": spec})
        assert json.loads(out.choices[0].message.content)["a"] in (1, 2)


def test_speculation_by_request_and_what_it_did(client) -> None:
    how = dict(model="tiny", prompt=PROMPT * 3, max_tokens=40, temperature=0)
    texts = set()
    for spec, drafted in (({"enabled": False}, False), (None, True), ({"max_tokens": 1}, True), ("ngram", True)):
        out = client.completions.create(**how, extra_body={"speculative": spec, "metrics": True})
        told = out.metrics["speculative_decoding"]
        assert bool(told["drafted"]) == drafted and told["accepted"] <= told["drafted"]
        assert out.usage.completion_tokens_details.accepted_prediction_tokens == told["accepted"]
        texts.add(out.choices[0].text)
    assert len(texts) == 1


def test_the_same_text_alone_and_among_others(llm, url) -> None:
    """32 at once, every other one without speculation, half of them streamed."""

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        how = dict(model="tiny", prompt=f"{PROMPT} {i}", max_tokens=20, temperature=1.0, seed=i)
        more = {"extra_body": {"speculative": bool(i % 2)}}
        if i % 4 < 2:
            return (await client.completions.create(**how, **more)).choices[0].text
        pieces = await client.completions.create(**how, **more, stream=True)
        return "".join([p.choices[0].text async for p in pieces])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*[one(client, i) for i in range(32)])

    alone = [offline(llm, f"{PROMPT} {i}", max_tokens=20, temperature=1.0, seed=i) for i in range(32)]
    assert asyncio.run(all_of_them()) == alone


# ------------------------------------------------------------------ other routes
def test_what_operators_ask(llm, url, client) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    for path, key in (("/health", "status"), ("/ready", "ready"), ("/version", "version")):
        assert web.get(url + path).json()[key]
    told = web.post(f"{url}/tokenize", json={"prompt": PROMPT}).json()
    assert told["tokens"] == llm.tokenizer.encode(PROMPT) and told["count"] == len(told["tokens"])
    assert web.post(f"{url}/detokenize", json={"tokens": told["tokens"]}).json()["prompt"] == PROMPT
    chat = web.post(f"{url}/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == llm.tokenizer.chat(MESSAGES)


def numbers(url: str) -> dict[str, float]:
    """What Prometheus reads, by name and labels but the model's."""
    lines = [line for line in web.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    names = [name.replace('model_name="tiny"', "").replace("{,", "{").replace(",}", "}") for name, _ in pairs]
    return {name: float(value) for name, (_, value) in zip(names, pairs, strict=True)}


def test_metrics_add_up(llm) -> None:
    with serving(llm) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        form = {"regex": "(ab){16}"}  # what repeats itself is foretold
        how = dict(model="tiny", prompt=PROMPT, max_tokens=40, extra_body={"metrics": True, "structured_outputs": form})
        told = [client.completions.create(**how) for _ in range(3)]
        found = numbers(url)
    drafted, accepted = (sum(t.metrics["speculative_decoding"][k] for t in told) for k in ("drafted", "accepted"))
    of = 'headstart:spec_decode_num_%s_total{drafter="ngram"}'
    assert found[of % "draft_tokens"] == drafted > 0 and found[of % "accepted_tokens"] == accepted > 0
    places = [v for k, v in found.items() if "per_pos_total" in k]
    assert sum(places) == accepted and places[0] == max(places)
    assert found["headstart:spec_decode_wasted_tokens_total{}"] == drafted - accepted
    assert found["headstart:generation_tokens_total{}"] == sum(t.usage.completion_tokens for t in told)
    assert found["headstart:prompt_tokens_total{}"] == sum(t.usage.prompt_tokens for t in told)
    assert sum(v for k, v in found.items() if "request_success_total" in k) == 3
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert found[f"headstart:{name}_seconds_count{{}}"] == 3
    gaps = found["headstart:inter_token_latency_seconds_count{}"]
    assert 0 < gaps < found["headstart:generation_tokens_total{}"]
    assert found["headstart:num_requests_running{}"] == found["headstart:num_requests_waiting{}"] == 0
    assert found['headstart:step_seconds_total{part="target"}'] > 0


def test_metrics_under_another_prefix(llm) -> None:
    with serving(llm, metrics_prefix="vllm") as url:
        web.post(f"{url}/v1/completions", json={"prompt": PROMPT * 3, "temperature": 0})
        assert all(name.startswith("vllm:") for name in numbers(url))


# ------------------------------------------------------------------ tools
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": only({"at": {"$ref": "#/$defs/Place"}}) | {"$defs": {"Place": {"enum": ["sky", "sea"]}}},
    },
}  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_tool_that_must_be_called_is_called(client, choice) -> None:
    how = dict(
        model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=120, temperature=1.0, seed=2
    )
    how["parallel_tool_calls"] = False
    whole = client.chat.completions.create(**how).choices[0]
    [call] = whole.message.tool_calls
    assert call.function.name == "look" and json.loads(call.function.arguments)["at"] in ("sky", "sea")
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    calls, reasons = [], []
    for piece in client.chat.completions.create(**how, stream=True):
        calls += [c for x in piece.choices for c in x.delta.tool_calls or []]
        reasons += [x.finish_reason for x in piece.choices if x.finish_reason]
        assert not any(x.delta.content for x in piece.choices)
    assert [c.function.arguments for c in calls] == [call.function.arguments] and reasons == ["tool_calls"]


TWO_CALLS = (
    'Well. <tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
)


PAIR = '[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": "{}"}]'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "dialect, text, shown, names",
    [
        (HERMES, TWO_CALLS, "Well.", ["a", "b"]),
        (HERMES, "x <tool_cal y", "x <tool_cal y", []),
        (HERMES, "<tool_call>no JSON</tool_call> and on", "<tool_call>no JSON and on", []),
        (MISTRAL, f"Well. [TOOL_CALLS]{PAIR}", "Well.", ["a", "b"]),
        (MISTRAL, "[TOOL_CALLS] no list", " no list", []),
        (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", []),
        (LLAMA, '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}', "", ["a", "b"]),
        (LLAMA, '<|python_tag|>{"name": "a", "parameters": {}}', "", ["a"]),
        (LLAMA, '{"no": "call"}', '{"no": "call"}', []),
        (LLAMA, 'Look: {"name": "a", "parameters": {}}', 'Look: {"name": "a", "parameters": {}}', []),
    ],
)  # fmt: skip
def test_calls_are_found_however_the_text_comes(dialect, text, shown, names, size: int) -> None:
    reader = ToolReader(dialect)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = [one for i, piece in enumerate(pieces) for one in reader.feed(piece, i == len(pieces) - 1)]
    assert "".join(one for one in found if isinstance(one, str)) == shown
    calls = [one for one in found if isinstance(one, Call)]
    assert [c.name for c in calls] == names and all(isinstance(json.loads(c.arguments), dict) for c in calls)


def test_words_that_are_hidden_stay_hidden() -> None:
    reader = ToolReader(MISTRAL, hidden=["</s>"])
    assert [*reader.feed("Well.</s>"), *reader.feed("", last=True)] == ["Well."]
    [call] = ToolReader(MISTRAL, hidden=["</s>"]).feed('[TOOL_CALLS][{"name": "a", "arguments": {}}]</s>', last=True)
    assert call.name == "a"


@pytest.mark.parametrize("sign", ["[TOOL_CALLS]", '"parameters": dictionary'])
@pytest.mark.parametrize("several", [True, False])
def test_every_dialect_can_be_required(llm, client, monkeypatch, sign: str, several: bool) -> None:
    monkeypatch.setattr(llm.tokenizer.hf, "chat_template", "{% if tools %}" + sign + "{% endif %}" + tiny.TEMPLATE)
    how = dict(messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=300, temperature=1.0, seed=3)
    out = client.chat.completions.create(model="tiny", parallel_tool_calls=several, **how).choices[0]
    if out.finish_reason != "length":
        calls = out.message.tool_calls
        assert calls and all(json.loads(c.function.arguments)["at"] in ("sky", "sea") for c in calls)
        assert several or len(calls) == 1
    else:
        assert several, "one call ends"


# ------------------------------------------------------------------ mistakes
@pytest.mark.parametrize(
    "path, body, status, words",
    [
        ("completions", "{", 400, "not valid JSON"),
        ("completions", "[]", 400, ""),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": PROMPT, "temprature": 0}, 400, "Did you mean 'temperature'"),
        ("completions", {"prompt": PROMPT, "temperature": -1}, 400, "temperature=-1.0 is not usable"),
        ("completions", {"prompt": PROMPT, "max_tokens": 0}, 400, "max_tokens=0"),
        ("completions", {"prompt": PROMPT, "best_of": 3}, 400, "best_of"),
        ("completions", {"prompt": PROMPT, "suffix": "x"}, 400, "suffix"),
        ("completions", {"prompt": []}, 400, "empty list"),
        ("completions", {"prompt": ""}, 400, "empty"),
        ("completions", {"prompt": [999999]}, 400, "outside the vocabulary"),
        ("completions", {"prompt": PROMPT * 200}, 400, "tokens"),
        ("completions", {"prompt": PROMPT, "model": "gpt-4"}, 404, "There is no model 'gpt-4'"),
        ("completions", {"prompt": PROMPT, "speculative": {"metod": "x"}}, 400, "metod"),
        ("completions", {"prompt": PROMPT, "speculative": "nonsense"}, 400, "nonsense"),
        ("completions", {"prompt": PROMPT, "structured_outputs": {"regex": "[a"}}, 400, "regex cannot be used"),
        ("completions", {"prompt": PROMPT, "stream_options": {"include_usage": True}}, 400, "stream=true"),
        ("chat/completions", {"messages": []}, 400, "messages is empty"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "logprobs=true"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "regex"}}, 400, "needs 'regex'"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "Each tool should be"),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice needs tools"),
        (
            "chat/completions",
            {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"function": {"name": "go"}}},
            400,
            "none of the tools",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"function": "go"}},
            400,
            "none of the tools",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
            400,
            "leave it out",
        ),
        ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, 400, "leave it out"),
        ("chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 999}, 400, "top_logprobs"),
        ("completions", {"prompt": PROMPT, "stop": ["x"] * 99}, 400, "stop"),
        ("completions", {"prompt": [PROMPT] * 400}, 400, "ask in parts"),
        ("completions", {"prompt": PROMPT, "request_id": "a\nb"}, 400, "request_id"),
        ("completions", {"prompt": PROMPT, "echo": True, "logprobs": 1, "stream": True}, 400, "in whole answers"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_a_mistake_is_one_sentence_and_nobody_else_notices(url, path, body, status, words) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    for stream in (False, True):
        if isinstance(body, dict) and stream and path != "nothing" and "stream_options" not in body:
            text = json.dumps(body | {"stream": True})
        got = web.post(f"{url}/v1/{path}", content=text, headers={"content-type": "application/json"})
        assert got.status_code == status, got.text
        message = got.json()["error"]["message"]
        assert words in message and "\n" not in message and "Traceback" not in message


def test_nulls_are_as_good_as_nothing(url) -> None:
    body = dict.fromkeys(
        ("n", "temperature", "top_p", "stop", "stream", "logprobs", "stream_options", "max_tokens", "seed")
    )
    assert web.post(f"{url}/v1/completions", json=body | {"prompt": PROMPT}).status_code == 200


def test_what_clients_send_and_means_nothing_here_is_accepted(client) -> None:
    out = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=2, user="someone", extra_body={"store": True}
    )
    assert out.choices[0].text is not None


# ------------------------------------------------------------------ who may come in
def test_keys(llm) -> None:
    with serving(llm, keys=("first", "second")) as url:
        body = {"prompt": PROMPT, "max_tokens": 2}
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("secon", 401), (None, 401)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            got = web.post(f"{url}/v1/completions", json=body, headers=headers)
            assert got.status_code == status
        assert web.get(f"{url}/health").status_code == 200 and web.get(f"{url}/v1/models").status_code == 401


def test_a_body_ends_where_it_may_said_or_not(llm) -> None:
    with serving(llm, max_body=1000) as url:
        body = json.dumps({"prompt": "x" * 2000})
        assert web.post(f"{url}/v1/completions", content=body).status_code == 413
        pieces = iter([body.encode()[i : i + 100] for i in range(0, len(body), 100)])
        assert web.post(f"{url}/v1/completions", content=pieces).status_code == 413


def test_limits_of_prompts_and_answers(llm) -> None:
    with serving(llm, max_prompt_tokens=8, max_output_tokens=5) as url:
        got = web.post(f"{url}/v1/completions", json={"prompt": PROMPT})
        assert got.status_code == 400 and "at most 8" in got.json()["error"]["message"]
        got = web.post(f"{url}/v1/completions", json={"prompt": "the", "max_tokens": 50, "ignore_eos": True}).json()
        assert got["usage"]["completion_tokens"] == 5


def test_too_many_are_turned_away_and_the_others_served(llm) -> None:
    async def ask(url: str, count: int) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=web.PATIENCE) as client:
            body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            return await asyncio.gather(*[client.post(f"{url}/v1/completions", json=body) for _ in range(count)])

    with serving(llm, max_queue=4) as url:
        answers = asyncio.run(ask(url, 40))
        codes = [a.status_code for a in answers]
        assert set(codes) == {200, 429} and codes.count(200) >= 12
        away = next(a for a in answers if a.status_code == 429)
        assert int(away.headers["retry-after"]) >= 1 and away.json()["error"]["type"] == "rate_limit_error"


def test_a_gate_lets_all_of_a_request_in_or_nothing() -> None:
    gate = Gate(4)
    with gate.enter(3):
        with pytest.raises(Exception, match="try again"), gate.enter(2):
            pass
        assert gate.inside == 3 and gate.turned_away == 1
    assert gate.inside == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_what_it_held(llm, stream: bool) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": stream}).encode()
    with serving(llm) as url:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port))) as s:
                head = b"host: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                s.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + body)
                if stream:
                    assert b"200 OK" in s.recv(4096)
                else:
                    while not llm.engine.scheduler.running:
                        time.sleep(0.005)
            end = time.time() + 5
            while not llm.engine.idle and time.time() < end:
                time.sleep(0.005)
            assert llm.engine.idle
        found = numbers(url)
        assert found["headstart:engine_rows_total{}"] < 3 * 300, "requests went on though nobody waited for them"
        assert found['headstart:request_success_total{finished_reason="abort"}'] == 3


# ------------------------------------------------------------------ one after the other
def test_between_two_requests_that_came_together_the_event_loop_sends() -> None:
    seen: list[str] = []

    async def ask(turns: Turns, name: str) -> None:
        await turns.mine()
        seen.append(name)

    async def sends() -> None:
        """Woken by what a step brought, as a listener is: in the round after the one in which it is told."""
        for _ in range(4):
            told = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(told.set_result, None)
            await told
            seen.append("token")

    async def together() -> None:
        turns = Turns()
        asks = [asyncio.create_task(ask(turns, name)) for name in "abcd"]
        sender = asyncio.create_task(sends())
        await asyncio.sleep(0)  # all of them wait
        asks[1].cancel()  # this client leaves
        await asyncio.wait([*asks, sender])
        await ask(turns, "e")

    asyncio.run(together())
    assert [name for name in seen if name != "token"] == ["a", "c", "d", "e"]
    order = "".join("." if name == "token" else name for name in seen)
    assert re.fullmatch(r"a\.+c\.+d\.*e", order), order
