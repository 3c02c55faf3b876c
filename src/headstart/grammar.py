"""Answers of a given form: JSON, a JSON schema, a regular expression, one of several texts, or a grammar.

A form allows some tokens at each place and no others, whoever proposed them. So to the engine it is one more rule about a row
of logits (`sampling`), told for the text that was written so far and for the draft tokens behind it, and the answer is the same
with drafts and without. llguidance knows grammars; here they become forms.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart import tree
from headstart.core import StructuredOutputs, Tree
from headstart.errors import BadInput

KEPT = 64  # grammars that are kept ready, the last ones
ANY_JSON = '{"type": "object"}'


class Form:
    """What one answer may go on with. It follows the answer as it grows, and forgets what a draft tried."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._read = 0  # tokens of the answer so far
        self.broken: str | None = None  # why it could not be followed: a grammar may become too large on its way

    def allowed(self, answer: Sequence[int], path: Sequence[int] = ()) -> np.ndarray | None:
        """(V,) the tokens that may stand behind the answer and this path. None: the path itself may not."""
        self._follow(answer)
        path = list(path)
        fits = self._matcher.try_consume_tokens(path) if path else 0
        found = self._mask() if fits == len(path) else None
        if fits:
            self._matcher.rollback(fits)
        return found

    def prune(self, answer: Sequence[int], draft: Tree) -> Tree:
        """The nodes of a draft that may stand behind the answer. What was drawn stays whole: chances judge it."""
        if not len(draft) or draft.logq_rows is not None:
            return draft
        self._follow(answer)
        fits: set[int] = set()
        for node in range(len(draft)):
            path = tree.path(draft.parents, node)
            if all(n in fits for n in path[:-1]):
                tokens = [draft.tokens[n] for n in path]
                fits |= {node} if self._matcher.validate_tokens(tokens) == len(tokens) else set()
        return draft if len(fits) == len(draft) else tree.select(draft, sorted(fits))

    def _follow(self, answer: Sequence[int]) -> None:
        new = list(answer[self._read :])
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        self._read += len(new)

    def _mask(self) -> np.ndarray:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():  # then it allows the end alone
            self.broken = _first_line(self._matcher.get_error())
        out = np.zeros(self._vocab_size, bool)
        out[: len(bits)] = bits[: self._vocab_size]
        return out


class Grammars:
    """Forms for the texts of one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise BadInput("structured_outputs need a model with a token that ends a text; this one has none.")
        self._library = _library()
        self._matcher, self._vocab_size = self._library.LLMatcher, vocab_size
        try:
            self._tokenizer = self._library.hf.from_tokenizer(tokenizer.hf, eos_token=sorted(eos_ids))
        except (ValueError, TypeError) as error:
            raise BadInput(f"structured_outputs cannot be had with this tokenizer: {error}") from error
        self._ready = functools.lru_cache(KEPT)(self._start)

    def form(self, wanted: StructuredOutputs) -> Form:
        return Form(self._ready(wanted).deep_copy(), self._vocab_size)

    def _start(self, wanted: StructuredOutputs) -> Any:
        """A matcher at the beginning of a text."""
        try:
            matcher = self._matcher(self._tokenizer, self._grammar(wanted), log_level=0)
        except ValueError as error:
            raise BadInput(f"structured_outputs.{wanted.kind} cannot be used: {_first_line(error)}") from error
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # a form that nothing can fit shows here, and not in the middle of an answer
        if first.is_error():
            raise BadInput(f"structured_outputs.{wanted.kind} cannot be used: {_first_line(first.get_error())}")
        return matcher

    def _grammar(self, wanted: StructuredOutputs) -> str:
        if wanted.json_object:
            return self._matcher.grammar_from_json_schema(ANY_JSON)
        if wanted.json is not None:
            return self._matcher.grammar_from_json_schema(wanted.json)
        if wanted.regex is not None:
            return self._matcher.grammar_from_regex(wanted.regex)
        if wanted.choice is not None:
            return self._matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice))
        return self._library.grammar_from("grammar", wanted.grammar)  # Lark, or llama.cpp's GBNF


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["no reason was given"])[0]


def _library() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise BadInput("structured_outputs need llguidance: pip install 'headstart[grammar]'.") from error
    return llguidance
