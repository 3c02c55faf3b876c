#!/usr/bin/env python3
"""Pictures of the playground: in light and in dark, on a phone, and with a race.

    pip install -e '.[serve,browser]'
    python scripts/page_shots.py --out DIR [--model smollm2] [--url http://localhost:8000]

Starts a server of its own unless --url names one. Needs Chromium, as `chromium` on the path.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

QUESTION = "Write a Python class for a stack with push, pop and peek, then one for a queue with the same methods."
LONGEST = 180_000  # milliseconds for an answer
STARTS = 300  # seconds for a server


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--model", default="smollm2")
    asked.add_argument("--url", help="a server that runs already")
    given = asked.parse_args()
    chromium = shutil.which("chromium") or sys.exit("There is no chromium on the path.")
    given.out.mkdir(parents=True, exist_ok=True)
    with serving(given.model, given.url) as url, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shoot(browser, url, given.out)
        browser.close()


@contextmanager
def serving(model: str, url: str | None) -> Iterator[str]:
    if url:
        yield url
        return
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    command = [str(Path(sys.executable).with_name("headstart")), "serve", model, "--port", str(port)]
    with subprocess.Popen(command) as server:
        try:
            wait(server, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def wait(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + STARTS
    while time.monotonic() < until:
        if server.poll() is not None:
            sys.exit("The server did not start.")
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5)
        except urllib.error.URLError:
            time.sleep(0.5)
        else:
            return
    sys.exit(f"The server was not ready within {STARTS} seconds.")


def shoot(browser: Browser, url: str, out: Path) -> None:
    desktop = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme="light")
    desktop.goto(url)
    save(desktop, out / "empty.png")
    chat(desktop)
    look_at_a_token(desktop)
    save(desktop, out / "light.png")
    desktop.emulate_media(color_scheme="dark")
    save(desktop, out / "dark.png")
    desktop.keyboard.press("Escape")
    race(desktop)
    save(desktop, out / "race-dark.png")
    desktop.emulate_media(color_scheme="light")
    save(desktop, out / "race.png")
    phone = browser.new_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    phone.goto(url)
    chat(phone, tokens=60)
    phone.locator("#log .t").nth(12).tap()
    save(phone, out / "phone-card.png")
    phone.mouse.move(2, 2)
    phone.keyboard.press("Escape")
    phone.screenshot(path=out / "phone.png", full_page=True)
    print(out / "phone.png")


def chat(page: Page, tokens: int = 200) -> None:
    page.locator("#settings summary").click()
    page.fill("#max-tokens", str(tokens))
    page.locator("#settings summary").click()
    page.fill("#message", QUESTION)
    page.keyboard.press("Enter")
    page.locator(".said .foot").wait_for(timeout=LONGEST)


def look_at_a_token(page: Page) -> None:
    """One that stands in place of a wrong draft, where there is any: its card has most to tell."""
    tokens = page.locator("#log .t.instead")
    (tokens if tokens.count() > 1 else page.locator("#log .t")).nth(1).click()


def race(page: Page) -> None:
    page.click("#tab-race")
    page.click("#race-start")
    page.locator("#verdict strong").wait_for(timeout=2 * LONGEST)


def save(page: Page, path: Path) -> None:
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(1500)  # so that the numbers are there, too
    page.screenshot(path=path)
    print(path)


if __name__ == "__main__":
    main()
