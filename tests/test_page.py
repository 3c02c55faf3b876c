"""The playground in a real browser: on the real server, and on canned streams where every colour is known beforehand."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from headstart import LLM, SamplingParams
from headstart.server.gate import Gate
from headstart.server.playground import FILES, HEADERS
from headstart.server.run import on_thread
from tests import tiny, web
from tests.test_server import serving

play = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

PROMPT = "she sells sea shells " * 6
TOKENS = 48
MESSAGES = [{"role": "user", "content": PROMPT}]
ATTACK = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
STATS: dict[str, Any] = {
    "model": "canned", "version": "0", "seconds_up": 1.0, "running": 0, "waiting": 0, "kv_use": 0.0, "steps": 3, "rows": 9,
    "tokens": 5, "seconds": {}, "method": "auto", "can_draft": ["eagle3", "ngram"], "policy": {},
    "drafters": {"ngram": {"drafts": 4, "drafted": 8, "accepted": 4, "accepted_by_position": {"0": 3, "1": 1}}},
    "why": ["ngram pays now.", f"Nothing is {ATTACK} here."],
}  # fmt: skip


# ------------------------------------------------------------------ canned answers
def step(number: int, tokens: list[str], accepted: int = 0, draft: dict[str, Any] | None = None, **choice: Any) -> dict:
    """One event of a chat stream; the first `accepted` tokens were drafted, as `draft` says."""
    draft = draft or {"tokens": [], "parents": [], "origins": [], "accepted": []}
    told = [
        {"token": t, "logprob": math.log(0.5), "top_logprobs": [_chance(t, 0.5), _chance("xx", 0.25)]} for t in tokens
    ]
    speculation = {
        "step": number,
        "pieces": [[t, number, i] for i, t in enumerate(tokens)],
        "tokens": tokens,
        "origins": [draft["origins"][n] for n in draft["accepted"]] + [None] * (len(tokens) - accepted),
        "draft": draft,
    }
    delta = {"content": "".join(tokens)}
    own = {"index": 0, "delta": delta, "logprobs": {"content": told}, "finish_reason": None, "speculation": speculation}
    return {"choices": [own | choice]}


def _chance(token: str, p: float) -> dict[str, Any]:
    return {"token": token, "logprob": math.log(p)}


BRANCHES = {
    "tokens": [" b", " z", " c", " y"],
    "parents": [-1, -1, 0, 0],
    "origins": ["ngram", "eagle3", "ngram", "eagle3"],
    "accepted": [0, 2],
}
WRONG = {"tokens": [" q"], "parents": [-1], "origins": ["eagle3"], "accepted": []}
DONE = {"drafted": 5, "accepted": 2, "by_drafter": {"ngram": {"drafted": 2, "accepted": 2}}}
EVENTS = [
    step(0, ["a"]),
    step(1, [" b", " c", " d"], 2, BRANCHES),
    step(2, [" e"], 0, WRONG, finish_reason="stop"),
    {"choices": [], "usage": {"completion_tokens": 5}, "metrics": {"speculative_decoding": DONE}},
]


@dataclass
class Canned:
    """What a stub answers, and what it was asked."""

    url: str = ""
    events: list[dict] = field(default_factory=lambda: copy.deepcopy(EVENTS))
    plain: list[dict] | None = None  # where speculation is off
    gap: float = 0.0  # seconds between events
    asked: list[dict] = field(default_factory=list)

    async def stream(self, body: dict) -> AsyncIterator[bytes]:
        off = body.get("speculative") == {"enabled": False}
        for event in self.plain if off and self.plain is not None else self.events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            await asyncio.sleep(self.gap)
        yield b"data: [DONE]\n\n"


def stub(canned: Canned) -> FastAPI:
    app = FastAPI()
    app.state.gate, app.state.give_up = Gate(8), lambda: None
    for path, (name, kind) in FILES.items():
        body = resources.files("headstart.server").joinpath("page", name).read_bytes()
        app.add_route(path, lambda _, body=body, kind=kind: Response(body, media_type=kind, headers=HEADERS))

    @app.get("/stats")
    async def stats() -> Any:
        return STATS | {"seconds_up": time.monotonic()}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        canned.asked.append(body)
        if body["messages"][-1]["content"] == "refuse me":
            return JSONResponse({"error": {"message": f"No: {ATTACK}."}}, 400)
        return StreamingResponse(canned.stream(body), media_type="text/event-stream")

    return app


# ------------------------------------------------------------------ a browser, and what it must never do
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with play.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


class Watched:
    """A page whose slips are written down."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(20_000)
        self.slips: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.slips.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.slips.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('policy: ' + e.violatedDirective))"
        )

    def open(self, url: str) -> Any:
        self.url = url
        self.page.goto(url)
        self.page.locator("#why li").first.wait_for()
        return self.page

    def check(self, allowed: str | None = None) -> None:
        assert [s for s in self.slips if allowed is None or allowed not in s] == []
        elsewhere = [r for r in self.requests if not r.startswith((self.url, "data:"))]
        assert elsewhere == [] and self.requests


@pytest.fixture
def watched(browser) -> Iterator[Watched]:
    made = Watched(browser)
    yield made
    made.page.close()


@pytest.fixture
def canned() -> Iterator[Canned]:
    made = Canned()
    with on_thread(stub(made)) as (_, made.url):
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Its drafter knows the answer to one prompt, and hides it in trees; about others it says what is wrong."""
    with LLM(tiny.loaded(), speculative={"method": "tests.tiny.Oracle", "num_draft_nodes": 24}, max_num_seqs=4) as made:
        tiny.Oracle.known = known = defaultdict(list)
        [told] = made.chat(MESSAGES, SamplingParams(max_tokens=TOKENS, temperature=0))
        known[tuple(made.tokenizer.chat(MESSAGES))] = told.token_ids
        yield made


@pytest.fixture(scope="module")
def url(llm) -> Iterator[str]:
    with serving(llm) as found:
        yield found


def say(page: Any, text: str, tokens: int | None = None) -> None:
    if tokens is not None:
        page.evaluate("n => { document.getElementById('max-tokens').value = n }", tokens)
    page.fill("#message", text)
    page.press("#message", "Enter")


def answer(page: Any) -> str:
    """Of the last answer, when it is finished."""
    page.locator(".said.model").last.locator(".foot").wait_for()
    return page.locator(".said.model .text").last.text_content()


def classes(page: Any) -> list[tuple[str, str]]:
    """Each token's text and kind."""
    found = page.locator("#log .t").evaluate_all("all => all.map(t => [t.textContent, t.className])")
    marks = ("drafted o0", "drafted o1", "bonus", "instead", "alone")
    return [(text, next(m for m in marks if m in name)) for text, name in found]


# ------------------------------------------------------------------ on the real server
def test_the_answer_is_the_api_s_and_its_tokens_have_origins(watched, url) -> None:
    page = watched.open(url)
    say(page, PROMPT, TOKENS)
    text = answer(page)
    body = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, "metrics": True}
    told = web.post(f"{url}/v1/chat/completions", json=body).json()
    assert text == told["choices"][0]["message"]["content"]
    kinds = [kind for _, kind in classes(page)]
    assert "".join(t for t, _ in classes(page)) == text and "drafted o0" in kinds and "bonus" in kinds, kinds
    accepted = told["metrics"]["speculative_decoding"]["accepted"]
    assert f"{accepted} of " in page.locator(".foot").text_content()
    page.click("#step-back")
    page.locator("#tree .link.taken").nth(1).wait_for(state="attached")  # a straight line has no height
    page.locator("#positions .column").first.wait_for()
    watched.check()


def test_a_race_ends_with_the_same_text(watched, url) -> None:
    page = watched.open(url)
    page.click("#tab-race")
    page.evaluate("n => { document.getElementById('max-tokens').value = n }", TOKENS)
    page.fill("#race-prompt", PROMPT)
    page.click("#race-start")
    page.locator("#verdict strong").wait_for()
    verdict = page.locator("#verdict").text_content()
    assert "Both wrote the same text, character for character." in verdict and "Tokens per step" in verdict
    plain, fast = (page.locator(f"#lane-{name} .text").text_content() for name in ("plain", "fast"))
    assert plain == fast != ""
    assert page.locator("#lane-plain .drafted").count() == 0 < page.locator("#lane-fast .drafted").count()
    page.click("#replay")
    page.wait_for_function(
        "text => [...document.querySelectorAll('.lane .text')].every(l => l.textContent === text)", arg=plain
    )
    watched.check()


def test_a_key_is_asked_for_and_kept_for_the_tab(watched, llm) -> None:
    with serving(llm, keys=["secret"]) as url:
        watched.url = url
        page = watched.page
        page.goto(url)
        page.locator("#key-form").wait_for()
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("did not accept").wait_for()
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.locator("#why li").first.wait_for()
        say(page, PROMPT, 8)
        assert answer(page)
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
        assert "secret" not in page.content()
        page.reload()
        page.locator("#why li").first.wait_for()
        assert page.locator("#key-form").is_hidden()
        watched.check(allowed="401")


def test_without_a_template_plain_completion_is_offered(watched) -> None:
    model = tiny.loaded()
    model.tokenizer.hf = copy.deepcopy(model.tokenizer.hf)
    model.tokenizer.hf.chat_template = None
    with LLM(model, speculative={"method": "ngram"}) as own, serving(own) as url:
        page = watched.open(url)
        say(page, PROMPT, 12)
        page.locator("[role=alert]").get_by_text("no chat template").wait_for()
        assert page.input_value("#message") == PROMPT, "nothing has to be typed again"
        page.get_by_role("button", name="Use plain completion").click()
        page.press("#message", "Enter")
        wanted = web.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, "temperature": 0}).json()
        assert answer(page) == wanted["choices"][0]["text"]
        page.locator("#log .t").first.focus()
        page.locator("#card").get_by_text("Most likely here").wait_for()
        watched.check(allowed="400")


# ------------------------------------------------------------------ on canned streams
def test_each_token_shows_where_it_came_from(watched, canned) -> None:
    page = watched.open(canned.url)
    say(page, "go")
    assert answer(page) == "a b c d e"
    drafted = "drafted o1"  # ngram is the second of can_draft
    kinds = [("a", "alone"), (" b", drafted), (" c", drafted), (" d", "bonus"), (" e", "instead")]
    assert classes(page) == kinds
    [asked] = canned.asked
    assert asked["messages"] == [{"role": "user", "content": "go"}]
    assert asked["show_drafts"] and asked["top_logprobs"] == 4 and "speculative" not in asked
    page.locator("#log .t").nth(1).hover()
    card = page.locator("#card")
    text = card.text_content()
    for words in (
        "␣b",
        "Drafted by ngram, accepted.",
        "Probability 50%",
        "xx",
        "25%",
        "Drafted here, and rejected",
        "␣z",
    ):
        assert words in text
    assert "␣y" not in text, "that one was drafted elsewhere"
    page.locator("#log .t").nth(3).hover()
    page.wait_for_function("document.getElementById('card').textContent.includes('bonus')")
    watched.check()


def test_the_tree_has_the_accepted_path_and_every_step_can_be_seen(watched, canned) -> None:
    page = watched.open(canned.url)
    say(page, "go")
    answer(page)
    assert "1 token drafted by eagle3, none accepted; then the model wrote “␣e”" in page.text_content("#tree-summary")
    page.locator("#log .t").nth(2).click()
    page.get_by_text("step 2 of 3").wait_for()
    taken = page.locator("#tree .node.taken text").all_text_contents()
    assert taken == ["␣b", "␣c", "␣d"], "from the root to the model's own token"
    assert page.locator("#tree .node:not(.taken):not(.root) text").all_text_contents() == ["␣y", "␣z"]
    assert page.locator("#tree .node.end text").all_text_contents() == ["␣d"]
    assert page.locator("#tree .link.taken").count() == 3
    assert "2 accepted" in page.locator("#tree svg").get_attribute("aria-label")
    assert page.locator("#log .picked").all_text_contents() == [" b", " c", " d"]
    page.click("#step-back")
    page.get_by_text("Nothing was drafted in this step").wait_for()
    assert page.locator("#tree .node").count() == 2
    watched.check()


def test_what_a_model_or_a_server_says_stays_text(watched, canned) -> None:
    draft = {"tokens": [ATTACK, ATTACK + "2"], "parents": [-1, -1], "origins": [ATTACK, "ngram"], "accepted": [0]}
    canned.events = [step(0, [ATTACK, "\u202e</span>"], 1, draft, finish_reason="stop")]
    page = watched.open(canned.url)
    say(page, ATTACK)
    assert answer(page) == ATTACK + "\u202e</span>"
    assert page.locator(".said.user .text").text_content() == ATTACK
    page.locator("#log .t").first.click()
    assert ATTACK.split()[0] in page.text_content("#card") and ATTACK in page.text_content("#why")
    page.click("#new-chat")
    say(page, "refuse me")
    page.locator("[role=alert]").get_by_text("onerror").wait_for()
    assert page.locator("img, main script").count() == 0 and page.evaluate("window.hit") is None
    watched.check(allowed="400")


def test_the_keyboard_is_enough(watched, canned) -> None:
    page = watched.open(canned.url)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the skip link
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    answer(page)
    assert canned.asked[0]["messages"][0]["content"] == "one\ntwo"
    assert page.locator("#log [tabindex='0']").count() == 1, "Tab does not walk through all tokens"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.textContent") == "a"
    for key, token in (
        ("ArrowRight", " b"),
        ("ArrowDown", " e"),
        ("ArrowUp", " b"),
        ("End", " e"),
        ("ArrowLeft", " d"),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.textContent") == token
    assert "bonus" in page.text_content("#card") and page.locator("#card").is_visible()
    page.keyboard.press("Enter")
    page.get_by_text("step 2 of 3").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.locator("#race").is_visible() and page.locator("#chat").is_hidden()
    watched.check()


def test_escape_stops_and_keeps_what_came(watched, canned) -> None:
    canned.events = [step(i, [f" {i}"]) for i in range(1000)]
    canned.gap = 0.02
    page = watched.open(canned.url)
    say(page, "go")
    page.locator("#log .t").nth(3).wait_for()
    page.keyboard.press("Escape")
    assert answer(page).startswith(" 0 1 2")
    assert "Stopped" in page.locator(".foot").text_content() and page.locator("#send").is_enabled()
    canned.events, canned.gap = EVENTS, 0.0
    say(page, "more")
    page.locator(".foot").nth(1).wait_for()
    roles = [m["role"] for m in canned.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    watched.check()


def test_an_error_in_the_middle_of_a_stream_is_shown(watched, canned) -> None:
    canned.events = [step(0, ["a"]), {"error": {"message": "The engine stopped.", "type": "server_error"}}]
    page = watched.open(canned.url)
    say(page, "go")
    page.locator("[role=alert]").get_by_text("The engine stopped.").wait_for()
    assert answer(page) == "a" and "Broken off" in page.locator(".foot").text_content()
    say(page, "refuse me")
    page.locator("[role=alert]").get_by_text("onerror").wait_for()
    assert page.locator(".said").count() == 2 and page.get_by_text("step 1 of 1").is_visible(), (
        "as if it had not been sent"
    )
    watched.check(allowed="400")


def test_a_race_says_where_texts_differ(watched, canned) -> None:
    canned.plain = [step(i, [t]) for i, t in enumerate(["a", " b", " c", " D", " e"])]
    canned.gap = 0.01
    page = watched.open(canned.url)
    page.click("#tab-race")
    page.click("#race-start")
    page.locator("#verdict strong").wait_for()
    assert "first at character 7: plain has “D␣e”, speculative has “d␣e”" in page.text_content("#verdict")
    plain, fast = canned.asked
    assert plain["speculative"] == {"enabled": False} and "speculative" not in fast
    assert plain["seed"] == fast["seed"] and plain["messages"] == fast["messages"]
    watched.check()


def test_many_tokens_are_shown_in_good_time(watched, canned) -> None:
    canned.events = [step(i, [f" {i}", "!"]) for i in range(1000)]
    page = watched.open(canned.url)
    page.evaluate(
        "() => { window.slow = []; new PerformanceObserver(l => window.slow.push(...l.getEntries().map(e => e.duration)))"
        ".observe({type: 'longtask'}) }"
    )
    began = time.monotonic()
    say(page, "go")
    assert len(answer(page)) > 3000 and page.locator("#log .t").count() == 2000
    assert time.monotonic() - began < 15 and max(page.evaluate("window.slow"), default=0) < 2000
    watched.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_in_one_column(browser, canned, scheme: str) -> None:
    canned.events = [step(0, ["x" * 300, " <- long"], 0), *[step(i, [f" word{i}"]) for i in range(1, 60)]]
    size = {"width": 360, "height": 640}
    watched = Watched(browser, viewport=size, color_scheme=scheme, has_touch=True, is_mobile=True)
    page = watched.open(canned.url)
    say(page, "y" * 300)
    answer(page)
    fits = "() => document.documentElement.scrollWidth <= 360"
    assert page.evaluate(fits)
    page.locator("#log .t").nth(2).tap()
    card = page.locator("#card").bounding_box()
    assert card["x"] >= 0 and card["x"] + card["width"] <= 360
    page.click("#tab-race")
    assert page.evaluate(fits)
    page.locator("#settings summary").click()
    small = """() => [...document.querySelectorAll('button, select, input, summary')]
        .filter(e => e.offsetParent && e.getBoundingClientRect().height < 40).map(e => e.id)"""
    assert page.evaluate(fits) and page.evaluate(small) == []
    watched.check()
    page.close()


CONTRAST = """() => {
  const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const over = (colours) => {
    paint.clearRect(0, 0, 1, 1);
    for (const c of colours) { paint.fillStyle = c; paint.fillRect(0, 0, 1, 1) }
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => c.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  return [...document.querySelectorAll('#log .t, .quiet, h1, h2, h3, button:not(:disabled), .legend li, #why li')]
    .filter(e => e.offsetParent).map(e => {
      const grounds = [];
      for (let up = e; up; up = up.parentElement) grounds.unshift(getComputedStyle(up).backgroundColor);
      const [a, b] = [over(grounds), over([...grounds, getComputedStyle(e).color])].map(light);
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className || e.id || e.tagName];
    });
}"""


def test_light_and_dark_can_both_be_read(browser, canned) -> None:
    watched = Watched(browser, color_scheme="light")
    page = watched.open(canned.url)
    say(page, "go")
    answer(page)
    page.mouse.move(1, 1)
    grounds = set()
    for theme in ("as the system has it", "dark", "light"):
        assert page.get_attribute("#theme", "aria-label") == f"Theme: {theme}"
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        grounds.add(ground)
        assert [(round(ratio, 2), name) for ratio, name in page.evaluate(CONTRAST) if ratio < 4.5] == []
        page.click("#theme")
        page.mouse.move(1, 1)
    assert len(grounds) == 2
    underlines = page.locator("#legend .sample").evaluate_all("all => all.map(s => getComputedStyle(s).textDecoration)")
    assert len(set(underlines)) == len(underlines) == 5, "colour is not the only sign"
    watched.check()
    page.close()
