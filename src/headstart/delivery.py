"""From tokens to what a listener gets: text as it becomes safe to show, and why it ended.

Stop strings need the text of a token before the next step may begin; all other text can wait until the device is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headstart.core import Chunk, Request, TokenLogprobs, Tree
from headstart.errors import FormFailed
from headstart.text import TextStream

TAIL = 5  # prompt tokens that the text of the first new one may depend on
Decode = Callable[[Sequence[int], bool], str]


@dataclass
class Parcel:
    """One request's new tokens, on their way out; all of them where nobody reads along."""

    request: Request
    tokens: list[int]
    from_draft: list[bool]  # empty where nobody reads along
    finish_reason: str | None = None  # as it was with these tokens
    logprobs: list[TokenLogprobs] | None = None
    draft: Tree | None = None  # where somebody wants to see it,
    accepted: list[int] = field(default_factory=list)  # and which of its nodes were


class Delivery:
    def __init__(self, decode: Decode | None) -> None:
        self.decode = decode
        self.streams: dict[str, TextStream] = {}

    def add(self, request: Request) -> None:
        """A new request: its text begins."""
        decode, p = self.decode, request.params
        if decode is not None and p.detokenize:
            self.streams[request.id] = TextStream(
                lambda ids: decode(ids, p.skip_special_tokens),
                p.stop,
                p.include_stop_str_in_output,
                request.prompt[-TAIL:],
            )

    def stops(self, request: Request, token: int) -> str | None:
        """The stop string that this token completes, for requests that have any."""
        stream = self.streams.get(request.id)
        if stream is None or not request.params.stop or not _shows(request, token):
            return None
        return stream.stopped_by if stream.push(token, request.num_output >= request.params.min_tokens) else None

    def chunk(self, parcel: Parcel) -> Chunk:
        """What the listener gets. The last one ends the text."""
        request, stream = parcel.request, self.streams.get(parcel.request.id)
        if parcel.finish_reason is not None and request.form is not None and request.form.broken is not None:
            raise FormFailed(f"The form of this answer could not be followed to its end: {request.form.broken}")
        text = ""
        if stream is not None:
            shown = [t for t in parcel.tokens if _shows(request, t)] if not request.params.stop else []
            if request.streams:
                for token in shown:
                    stream.push(token)
            else:
                stream.extend(shown)
            if parcel.finish_reason is not None:
                stream.finish()
                self.forget(request)
            text = stream.take()
        reason, why = parcel.finish_reason, request.stop_reason if parcel.finish_reason else None
        stats = request.stats.copy()
        return Chunk(
            text, parcel.tokens, parcel.from_draft, 0, reason, why, stats,
            logprobs=parcel.logprobs, draft=parcel.draft, accepted=parcel.accepted,
        )  # fmt: skip

    def forget(self, request: Request) -> None:
        self.streams.pop(request.id, None)


def _shows(request: Request, token: int) -> bool:
    """Is this token part of the text? One that ends it is not, unless the user named it or wants to see such tokens."""
    p = request.params
    return token not in request.stop_ids or not p.skip_special_tokens or token in p.stop_token_ids
