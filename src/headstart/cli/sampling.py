"""Sampling options: every field of SamplingParams under its own name. The command line is greedy unless told."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from typing import Annotated, Any

from headstart.cli.options import SAMPLING, MaxTokens, Temperature, option, read_file
from headstart.core import SamplingParams
from headstart.errors import BadInput


@dataclass(frozen=True)
class SamplingOptions:
    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    seed: Annotated[
        int | None, option("--seed", help="Same prompt and seed, same text. [default: drawn]", panel=SAMPLING)
    ] = None
    top_k: Annotated[int, option("--top-k", help="Keep the k likeliest tokens; 0 is off.", panel=SAMPLING)] = 0
    top_p: Annotated[
        float, option("--top-p", help="Keep the likeliest tokens that make up this probability.", panel=SAMPLING)
    ] = 1.0
    min_p: Annotated[
        float, option("--min-p", help="Drop tokens below this share of the likeliest one.", panel=SAMPLING)
    ] = 0.0
    typical_p: Annotated[
        float, option("--typical-p", help="Keep the most typical tokens that make up this probability.", panel=SAMPLING)
    ] = 1.0
    repetition_penalty: Annotated[
        float,
        option("--repetition-penalty", help="Above 1: tokens of prompt and answer become less likely.", panel=SAMPLING),
    ] = 1.0
    presence_penalty: Annotated[
        float, option("--presence-penalty", help="Subtracted once from tokens already in the answer.", panel=SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, option("--frequency-penalty", help="Subtracted for each time a token is in the answer.", panel=SAMPLING)
    ] = 0.0
    logit_bias: Annotated[
        str | None, option("--logit-bias", help="JSON, token id to bias: '{\"42\": -100}'.", panel=SAMPLING)
    ] = None
    bad_words: Annotated[
        list[str] | None,
        option("--bad-words", help="Text that must not appear; repeatable.", panel=SAMPLING, metavar="TEXT"),
    ] = None
    min_tokens: Annotated[int, option("--min-tokens", help="No end before so many tokens.", panel=SAMPLING)] = 0
    stop: Annotated[
        list[str] | None,
        option("--stop", help="Text that ends the answer and is cut off; repeatable.", panel=SAMPLING, metavar="TEXT"),
    ] = None
    stop_token_ids: Annotated[
        list[str] | None,
        option("--stop-token-ids", help="Token ids that end the answer: 2,7.", panel=SAMPLING, metavar="IDS"),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, option("--include-stop-str-in-output", help="Keep the stop text at the end.", panel=SAMPLING)
    ] = False
    json_schema: Annotated[
        str | None,
        option(
            "--json-schema",
            help="The answer is JSON of this schema: a file, or the schema itself.",
            panel=SAMPLING,
            metavar="SCHEMA",
        ),
    ] = None
    regex: Annotated[
        str | None,
        option("--regex", help="The answer matches this regular expression.", panel=SAMPLING, metavar="REGEX"),
    ] = None
    grammar: Annotated[
        str | None,
        option(
            "--grammar",
            help="The answer is of this grammar, Lark or GBNF: a file, or the grammar itself.",
            panel=SAMPLING,
            metavar="GRAMMAR",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, option("--ignore-eos", help="Go on behind the model's end of text.", panel=SAMPLING)
    ] = False
    keep_special_tokens: Annotated[
        bool, option("--keep-special-tokens", help="Show tokens like <|im_end|> in the text.", panel=SAMPLING)
    ] = False

    def params(self) -> SamplingParams:
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        given["skip_special_tokens"] = not given.pop("keep_special_tokens")
        given["logit_bias"] = _bias(self.logit_bias)
        forms = {"json": given.pop("json_schema"), "regex": given.pop("regex"), "grammar": given.pop("grammar")}
        if any(form is not None for form in forms.values()):
            forms["json"], forms["grammar"] = (
                _from_file("--json-schema", forms["json"]),
                _from_file("--grammar", forms["grammar"]),
            )
            given["structured_outputs"] = forms
        given["stop_token_ids"] = _token_ids(self.stop_token_ids or [])
        for name in ("stop", "bad_words"):
            given[name] = tuple(given[name] or ())
        return SamplingParams(**given)


@dataclass(frozen=True)
class GenerateSampling(SamplingOptions):
    """What makes sense for one prompt only."""

    n: Annotated[int, option("--n", "-n", help="How many answers.", panel=SAMPLING)] = 1
    logprobs: Annotated[
        int | None,
        option("--logprobs", help="With --json: log p of each token and of the so many likeliest.", panel=SAMPLING),
    ] = None
    prompt_logprobs: Annotated[
        int | None, option("--prompt-logprobs", help="With --json: the same for the prompt's tokens.", panel=SAMPLING)
    ] = None


def _from_file(flag: str, text: str | None) -> str | None:
    """What a file holds, where there is one of that name."""
    return text if text is None or not os.path.isfile(text) else read_file(flag, text)


def _bias(text: str | None) -> dict[int, float] | None:
    if text is None:
        return None
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise BadInput(
            f"--logit-bias {text!r} should be JSON that maps token ids to numbers: '{{\"42\": -100}}'."
        ) from None


def _token_ids(texts: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(part) for text in texts for part in text.split(","))
    except ValueError:
        raise BadInput(f"--stop-token-ids {','.join(texts)!r} should be token ids: 2,7.") from None
