"""The runner on llama.cpp itself, with the built-in model. Skipped where llama-cpp-python is not installed (make llamacpp)."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from headstart import LLM, BadInput, ConfigError, ModelError, RequestFailed, SamplingParams
from headstart.models import builtin
from headstart.models.llamacpp import native
from headstart.models.llamacpp.native import LlamaContext, LlamaFile, LlamaOptions
from headstart.models.llamacpp.runner import LlamaRunner
from headstart.models.llamacpp.sequences import GONE
from headstart.models.llamacpp.tokenizer import LlamaTokenizer
from headstart.models.load import Loaded, load
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


@functools.cache
def model() -> Loaded:
    """Loaded once, for every LLM here: checking the file takes seconds."""
    return load("smollm2", runner="llamacpp", max_len=512, llama=LlamaOptions(threads=1))


@functools.cache
def texts(method: str = "none", temperature: float = 0.0) -> list[list[int]]:
    spec = {"method": method, "num_speculative_tokens": 3}
    draft = model() if method == "draft_model" else None
    with LLM(model(), max_num_seqs=4, speculative=spec, draft=draft) as llm:
        out = []
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=temperature, max_tokens=40, seed=i)
            out.append(llm.chat([{"role": "user", "content": prompt}], params)[0].completions[0].token_ids)
        return out


def same_bits(file: LlamaFile) -> bool:
    """Does this build give a token the same logits alone and among five?"""
    context = LlamaContext(file, 64, 16, 1, 1)
    tokens, where = np.arange(100, 105), np.arange(5)
    together = context.decode(tokens, where, [[0]] * 5, where).copy()
    context.remove(0, 0, -1)
    alone = [context.decode(tokens[i : i + 1], where[i : i + 1], [[0]], where[:1]).copy()[0] for i in range(5)]
    context.close()
    return np.array_equal(together, np.array(alone))


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
def test_speculation_writes_what_plain_decoding_writes(file: LlamaFile, method: str, temperature: float):
    """To the letter where a token has the same bits alone and with others, as in the build of `make llamacpp`."""
    plain, drafted = texts("none", temperature), texts(method, temperature)
    if not same_bits(file):
        pytest.skip("this build of llama.cpp computes several tokens otherwise than one: texts may part at near-ties")
    assert plain == drafted


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
    with LLM(model()) as llm:
        assert type(llm.engine.runner).__name__ == "LlamaRunner"
        first = [{"role": "user", "content": "Name a colour, a fruit and a river, and say why you like each of them."}]
        answer = llm.chat(first, SamplingParams(temperature=0, max_tokens=24))[0].completions[0].text
        second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And another?"}]
        stats = llm.chat(second, SamplingParams(temperature=0, max_tokens=4))[0].completions[0].stats
        assert stats.cached_prompt_tokens > 32
        pieces = list(llm.stream(first, SamplingParams(temperature=0, max_tokens=24)))
        assert "".join(c.text for c in pieces) == answer


# ------------------------------------------------------------------ what is in memory
def check(runner: LlamaRunner) -> None:
    """llama.cpp's memory holds what the books say."""
    lib, memory = runner.context.lib, runner.context._memory
    for seq, held in runner.seqs.held.items():
        there = np.flatnonzero(held.slots != GONE)
        ends = (int(there[0]), int(there[-1])) if len(there) else (-1, -1)
        assert (lib.llama_memory_seq_pos_min(memory, seq), lib.llama_memory_seq_pos_max(memory, seq)) == ends
    for seq in runner.seqs._free:
        assert lib.llama_memory_seq_pos_max(memory, seq) == -1, f"sequence {seq} is free and holds something"
    assert not runner.seqs._busy and not runner.seqs._rows


def test_memory_holds_what_the_books_say():
    """Trees, chains, plain steps, shared prompts, somebody who leaves: after each, sequence by sequence."""
    spec = {"method": "draft_model", "num_speculative_tokens": 3, "tree": True, "p_split": 0.02}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    with LLM(model(), speculative=spec, draft=model(), max_num_seqs=4, kv_memory=60 << 20) as llm:
        runners = [llm.engine.runner, llm.engine.drafting.drafters["draft_model"].runner]
        chats = [llm.tokenizer.chat([{"role": "user", "content": p}]) for p in [*PROMPTS, PROMPTS[0]]]
        for method in (None, "suffix", False):
            outs = llm.generate(chats, params, speculative=method)
            assert method is not None or sum(o.stats.accepted for o in outs) > 10
            for runner in runners:
                check(runner)
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())  # Ctrl-C in the middle of an answer
        want = llm.generate(PROMPTS[1], params, speculative=False)[0].text
        assert llm.generate(PROMPTS[1], params, speculative=False)[0].text == want
        assert llm.engine.idle and not llm.engine.pool.tables
        for runner in runners:
            check(runner)
    assert all(runner.context is None for runner in runners)


def test_what_was_computed_behind_a_copy_is_found():
    """A prompt is computed twice, the second time for its logprobs; a third request reads what followed that copy."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(model(), max_num_seqs=2) as llm:
        ids = llm.tokenizer.encode("The old lighthouse stands at the end of a long pier, and every evening its keeper")
        llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=2))
        whole = llm.generate(ids, replace(params, prompt_logprobs=0))[0].token_ids
        third = llm.generate([*ids, *whole[:34]], replace(params, max_tokens=6))[0]
        assert third.stats.cached_prompt_tokens >= 32 and third.token_ids[:3] == whole[34:37]
        check(llm.engine.runner)


def test_closing_in_the_middle_of_an_answer():
    with LLM(
        "smollm2", runner="llamacpp", threads=1, kv_type="q8_0", flash_attention=True, max_model_len=256, max_num_seqs=1
    ) as llm:
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        assert next(stream).token_ids
    assert llm.engine.runner.context is None and not llm.engine.pool.tables
    for ask in (lambda: list(stream), lambda: llm.generate(PROMPTS[0])):
        with pytest.raises(RequestFailed, match="closed"):
            ask()


# ------------------------------------------------------------------ files and vocabularies
def test_what_the_file_says_of_itself(file: LlamaFile, tmp_path):
    assert file.slot_bytes == 30 * 3 * (64 + 64) * 2 and file.vocab_size == 49152 and file.max_len == 8192
    assert 80_000_000 < file.weight_bytes < 100_000_000 and "Q4_1" in file.describe()
    assert file.meta("general.architecture") == "llama" and file.meta("no.such.key") is None
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load .*x\.gguf"):
        LlamaFile(tmp_path / "x.gguf", LlamaOptions())
    assert model().max_len == 512
    with pytest.raises(ConfigError, match="from 2 to at most 8192 positions"):
        load("smollm2", runner="llamacpp", max_len=10000)


def test_the_vocabulary(file: LlamaFile):
    words = LlamaTokenizer(file)
    pieces = words.pieces()
    assert len(pieces) == file.vocab_size and pieces[2] == "<|im_end|>" and 2 in words.eos_ids <= words.special_ids
    flags = "🇩🇪 👩‍👩‍👧‍👦"
    ids = words.encode(flags)
    assert words.decode(ids) == flags and len(ids) > 8
    for i in range(len(ids)):  # a cut inside a letter shows as such
        shown = words.decode(ids[:i])
        assert flags.startswith(shown.rstrip("\ufffd"))
    assert words.encode("") == [] and words.decode([]) == "" and words.decode([2]) == ""
    with pytest.raises(BadInput, match="cannot format these messages"):
        words.chat([{"content": "nobody said this"}, 3])
