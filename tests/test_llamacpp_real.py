"""The runner on llama.cpp itself, with the built-in model. Skipped where llama-cpp-python is not installed (make llamacpp)."""

from __future__ import annotations

import numpy as np
import pytest

from headstart import LLM, SamplingParams
from headstart.models import builtin
from headstart.models.llamacpp import native
from headstart.models.llamacpp.native import LlamaContext, LlamaFile, LlamaOptions
from headstart.models.llamacpp.tokenizer import LlamaTokenizer
from headstart.models.tokenizer import load_tokenizer

WHY_NOT = native.available() or (
    None if builtin.path_of(builtin.SMOLLM2).exists() else "the built-in model is not here"
)
pytestmark = [pytest.mark.llamacpp, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
TEXTS = ["Hello, world!", "  two  spaces\n\tand a tab", "naïve café 😀 你好", "<|im_start|>user\nHi<|im_end|>\n"]
PROMPTS = ["Repeat: one two three four, one two three four.", "List five fruits."]


@pytest.fixture(scope="module")
def file() -> LlamaFile:
    return LlamaFile(builtin.path_of(builtin.SMOLLM2), LlamaOptions(threads=1))


def texts(speculative=None, temperature: float = 0.0) -> list[list[int]]:
    with LLM(
        "smollm2", runner="llamacpp", threads=1, max_model_len=512, max_num_seqs=4, speculative=speculative
    ) as llm:
        out = []
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=temperature, max_tokens=40, seed=i)
            out.append(llm.chat([{"role": "user", "content": prompt}], params)[0].completions[0].token_ids)
        return out


def test_greedy_is_what_llamacpp_itself_writes(file: LlamaFile):
    context, tokenizer = LlamaContext(file, 512, 128, 1, 1), LlamaTokenizer(file)
    for prompt, ours in zip(PROMPTS, texts(), strict=True):
        ids, written = tokenizer.chat([{"role": "user", "content": prompt}]), []
        context.remove(0, 0, -1)
        logits = context.decode(np.array(ids), np.arange(len(ids)), [[0]] * len(ids), np.array([len(ids) - 1]))
        while len(written) < 40:
            written.append(int(logits[0].argmax()))
            if written[-1] in tokenizer.eos_ids:
                break
            at = np.array([len(ids) + len(written) - 1])
            logits = context.decode(np.array(written[-1:]), at, [[0]], np.array([0]))
        assert ours == written
    context.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_speculation_writes_what_plain_decoding_writes(method: str, temperature: float):
    """To the letter with the build of `make llamacpp`. Other builds may part at near-ties, so there one text may differ."""
    spec = {"method": method, "num_speculative_tokens": 3} | ({"model": "smollm2"} if method == "draft_model" else {})
    plain, drafted = texts(None, temperature), texts(spec, temperature)
    assert sum(a != b for a, b in zip(plain, drafted, strict=True)) <= 1


def test_tokens_are_those_of_the_tokenizer_that_transformers_makes(file: LlamaFile, tmp_path_factory):
    from headstart.models.load import resolve

    ours, theirs = LlamaTokenizer(file), load_tokenizer(resolve("smollm2"))
    for text in TEXTS:
        ids = ours.encode(text, special=False)
        assert ids == theirs.encode(text, special=False)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == theirs.decode(ids)
    messages = [{"role": "user", "content": "Hi 😀"}]
    assert ours.chat(messages) == theirs.chat(messages)
    assert theirs.eos_ids <= ours.eos_ids


def test_a_second_turn_finds_the_first_ones_work():
    with LLM("smollm2", runner="llamacpp", threads=1, max_model_len=512) as llm:
        assert type(llm.engine.runner).__name__ == "LlamaRunner"
        first = [{"role": "user", "content": "Name a colour, a fruit and a river, and say why you like each of them."}]
        answer = llm.chat(first, SamplingParams(temperature=0, max_tokens=24))[0].completions[0].text
        second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And another?"}]
        stats = llm.chat(second, SamplingParams(temperature=0, max_tokens=4))[0].completions[0].stats
        assert stats.cached_prompt_tokens > 32
        pieces = list(llm.stream(first, SamplingParams(temperature=0, max_tokens=24)))
        assert "".join(c.text for c in pieces) == answer
