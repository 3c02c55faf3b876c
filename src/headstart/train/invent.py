"""More prompts like those at hand: the target writes them itself, from examples (self-instruct, arXiv 2212.10560)."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.core import Output, SamplingParams
from headstart.errors import BadInput
from headstart.progress import bar, note
from headstart.train.data import Prompt, user_prompt, whole_lines

if TYPE_CHECKING:
    from headstart.llm import LLM

EXAMPLES, EACH = 5, 10  # prompts that are shown, and new ones that are asked for, at a time
LONGEST, SHORTEST = 300, 12  # characters of a prompt that is shown, and of one that is kept
MAX_TOKENS = 64 * EACH
BARREN = 0.05  # a round that brings less than this share of what was asked for is the last one
ASK = """Here are some requests that users made:

{examples}

Write {each} new requests {kind}, as a numbered list with one request on each line. Write the requests only, no answers."""
KINDS = (
    "of the same kind, each about something else",
    "of the same kind, but harder and with more detail",
    "that the same users might make next, each on another subject",
)
ITEM = re.compile(r"\s*\d+\s*[.):]\s+(.+)")


def invent(llm: LLM, prompts: Sequence[Prompt], count: int, out: Path, batch: int = 64, seed: int = 0) -> list[Prompt]:
    """`count` prompts that are not among `prompts`, in a file that grows as they come. What it has is not asked for again."""
    shown = examples(prompts)
    out.parent.mkdir(parents=True, exist_ok=True)
    found, asked = read_invented(out)
    known = {p.id for p in prompts}
    with open(out, "a", encoding="utf-8") as file, bar("Prompts", count, "prompts", len(found)) as advance:
        while len(found) < count:
            before, asks = len(found), range(asked, asked + min(batch, -(-(count - len(found)) // EACH)))
            for ask, text in _offers(llm, shown, asks, seed):
                prompt = user_prompt(text)
                if len(found) < count and prompt.id not in known and prompt.id not in found:
                    found[prompt.id] = prompt
                    file.write(json.dumps({"ask": ask, "prompt": text}) + "\n")
            file.flush()
            os.fsync(file.fileno())
            asked, gain = asks.stop, len(found) - before
            advance(gain)
            if gain < BARREN * EACH * len(asks):
                note(f"The target has no more new prompts to offer: there are {len(found)} of {count}.")
                break
    return list(found.values())


def examples(prompts: Sequence[Prompt]) -> list[str]:
    """The prompts that fit into a list."""
    found = [text for p in prompts if len(text := p.messages[-1][1]) <= LONGEST and "\n" not in text]
    if len(found) < EXAMPLES:
        raise BadInput(
            f"More prompts are written after the example of those at hand: that takes {EXAMPLES} of one line and at most "
            f"{LONGEST} characters, and there are {len(found)}."
        )
    return found


def read_invented(path: Path) -> tuple[dict[str, Prompt], int]:
    """What a file has by id, and the number of the next ask."""
    try:
        items = [json.loads(line) for _, line in whole_lines(path, repair=True)] if path.exists() else []
        found = [user_prompt(item["prompt"]) for item in items]
        return {p.id: p for p in found}, 1 + max((int(item["ask"]) for item in items), default=-1)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"{path} is not a file of prompts that a target wrote: remove it, or name another folder."
        ) from None


def _offers(llm: LLM, shown: Sequence[str], asks: range, seed: int) -> Iterator[tuple[int, str]]:
    """(number of the ask, prompt) of what the target offers."""
    messages = [[{"role": "user", "content": question(shown, ask, seed)}] for ask in asks]
    params = [SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed + ask) for ask in asks]
    for ask, output in zip(asks, llm.chat(messages, params), strict=True):
        yield from ((ask, text) for text in listed(output))


def question(shown: Sequence[str], ask: int, seed: int) -> str:
    """What the target is asked: other examples each time, and each kind in turn."""
    chosen = random.Random(f"{seed} {ask}").sample(shown, EXAMPLES)
    return ASK.format(examples="\n".join(f"- {e}" for e in chosen), each=EACH, kind=KINDS[ask % len(KINDS)])


def listed(output: Output) -> list[str]:
    """The items of a numbered list; not the last one where the answer was cut off."""
    lines = output.text.splitlines()
    if output.finish_reason == "length":
        lines = lines[:-1]
    found = [match.group(1).strip(" *") for line in lines if (match := ITEM.fullmatch(line))]
    return [text for text in found if len(text) >= SHORTEST]
