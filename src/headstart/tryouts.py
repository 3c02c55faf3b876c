"""How good drafters with weights are at this target: tried out once, on questions of several kinds, before anybody asks.

Where drafts are made ahead (`policy.ahead`), a policy has to guess what they bring until it has seen some, and to find out
takes time in which nothing may pay. Here that is no traffic's time. What real texts say counts for more from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from headstart.core import Request, RequestSpeculation, SamplingParams
from headstart.drafters import WEIGHTLESS
from headstart.engine import Engine
from headstart.errors import BadInput
from headstart.models.load import Loaded
from headstart.models.tokenizer import Tokenizer
from headstart.policy.ahead import AheadPolicy
from headstart.policy.outcomes import Tally
from headstart.policy.periods import Mode
from headstart.progress import bar
from headstart.rehearse import running

ANSWER = 80  # tokens of each answer, at most
QUESTIONS = (
    "Write a Python function that returns the n-th prime number, with a docstring and two tests.",
    "Why do the seasons change? Explain it to a child of ten.",
    "Translate into French: The train to the coast leaves at noon, and we still have no tickets.",
    "A shop sells pens at 3 for 2 dollars. How much do 24 pens cost? Show each step.",
    "Write the beginning of a story about a lighthouse keeper who finds a letter in a bottle.",
    "Make this loop a list comprehension:\nout = []\nfor x in data:\n    if x > 0:\n        out.append(x * x)",
    "Summarize in two sentences: The council met on Tuesday to discuss the old bridge. Engineers had found cracks in two of "
    "its four pillars. A repair would cost less than a new bridge, but it would close the road for eight months. The council "
    "asked for a second opinion and will decide in the spring.",
    "List five things to check before buying a used bicycle.",
    "Write an SQL query that finds the three customers with the highest total of orders in 2024.",
    "Write a polite e-mail that moves a meeting from Monday to Thursday.",
    "What is the difference between a virus and a bacterium?",
    "Explain what this does: const m = new Map(xs.map(x => [x.id, x]));",
    "Give three arguments for and three against working from home.",
    "Solve for x and check the result: 5(x - 2) = 3x + 8.",
    "Make a JSON object for a book with title, authors, year and a list of two chapters.",
    "Describe a quiet street in the rain, in about eighty words.",
)


def questions(tokenizer: Tokenizer | None, most: int, vocabulary: int) -> list[list[int]]:
    """As this model is asked; those that fit into so many tokens with their answers. None without a tokenizer."""
    asked = [_encoded(tokenizer, text) for text in QUESTIONS] if tokenizer is not None else []
    return [ids for ids in asked if 0 < len(ids) <= most - ANSWER and max(ids) < vocabulary]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """With its chat template, where it has one that takes a plain question."""
    with contextlib.suppress(BadInput):
        if tokenizer.has_chat_template():
            return tokenizer.chat([{"role": "user", "content": text}])
    return tokenizer.encode(text + "\n")


def try_out(engine: Engine, policy: AheadPolicy, model: Loaded) -> bool:
    """Tell the policy what drafts bring of which it knows nothing, in their longest chains and trees. Returns whether there
    were any."""
    modes = {name: policy.modes([name]) for name in engine.drafting.drafters if name not in WEIGHTLESS}
    new = [
        m for own in modes.values() for m in _deepest(own) if policy.periods.knows(m) and not policy.outcomes.knows(m)
    ]
    asked = questions(model.tokenizer, engine.max_len - 1, engine.runner.vocab_size) if new else []
    if not asked:
        return False
    policy.rehearses = True
    try:
        with bar("Trying out drafts", len(new), "ways") as done:
            for mode in new:
                policy.outcomes.expect(mode, _answer(engine, policy, model, asked, mode))
                engine.pool.forget_finished()  # the next ones are to meet the same
                done(1)
    finally:
        policy.rehearses, policy.ordered = False, ()
        engine.forget()
    return True


def _deepest(modes: Sequence[Mode]) -> list[Mode]:
    """The longest chain and the largest tree: they tell of the others, too."""
    found = {m.branches: m for m in sorted(modes, key=lambda m: (m.depth, m.nodes))}
    return list(found.values())


def _answer(engine: Engine, policy: AheadPolicy, model: Loaded, asked: Sequence[list[int]], mode: Mode) -> Tally:
    """All of them in this mode. How many drafts brought 0, 1, ... tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER)
    speculation = RequestSpeculation(method=mode.drafter)
    made_up = [Request(ids, params, 0, eos_ids=model.eos_ids, speculation=speculation) for ids in asked]
    with running(engine, made_up) as requests:
        policy.order([mode])
        while any(r.finish_reason is None for r in requests):
            engine.step()
    return policy.tally
