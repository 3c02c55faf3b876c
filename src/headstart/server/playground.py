"""The page at `/`: a playground that shows speculation at work, and the numbers that it draws.

Its three files lie in `page/` as they are served: nothing is built, and nothing comes from elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI
from starlette.responses import Response

from headstart.version import VERSION

if TYPE_CHECKING:
    from headstart.llm import LLM
    from headstart.server.metrics import Metrics

T = TypeVar("T")
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
TRIES = 5  # to read what another thread writes


def add_playground(app: FastAPI, llm: LLM, meters: Metrics, name: str) -> None:
    began = time.monotonic()

    def serve(path: str) -> None:
        file, kind = FILES[path]
        body = resources.files("headstart.server").joinpath("page", file).read_bytes()

        @app.get(path, include_in_schema=False)
        async def page() -> Any:
            return Response(body, media_type=kind, headers=HEADERS)

    for path in FILES:
        serve(path)

    @app.get("/stats")
    async def stats() -> Any:
        """What the server has done so far, and why it drafts as it does."""
        return {"model": name, "version": VERSION, "seconds_up": time.monotonic() - began} | _steadily(
            lambda: numbers(llm, meters)
        )


def numbers(llm: LLM, meters: Metrics) -> dict[str, Any]:
    meter, engine, why = meters.meter, llm.engine, llm.explain()
    places: dict[str, dict[str, int]] = {}
    for (drafter, place), count in sorted(meter.by_position.items()):
        places.setdefault(drafter, {})[str(place)] = count
    return {
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "kv_use": engine.pool.num_used / engine.pool.num_pages,
        "steps": meter.steps,
        "rows": meter.rows,
        "tokens": meters.generated,
        "drafters": {
            d: {
                "drafts": meter.drafts[d],
                "drafted": meter.drafted[d],
                "accepted": meter.accepted.get(d, 0),
                "accepted_by_position": places.get(d, {}),
            }
            for d in sorted(meter.drafts)
        },
        "seconds": engine.seconds,
        "method": engine.drafting.config.method,
        "can_draft": sorted(engine.drafting.drafters),
        "policy": why.to_dict(),
        "why": why.sentences(),
    }


def _steadily(read: Callable[[], T]) -> T:
    """The engine's thread may write while we read: then once more."""
    for _ in range(TRIES):
        try:
            return read()
        except RuntimeError:  # a dict changed while it was looked through
            continue
    return read()
