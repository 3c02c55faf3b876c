"""The real llama.cpp with the built-in model: against its own bare loop, and against transformers' tokenizer of the same file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headstart import LLM, BadInput, ConfigError, ModelError, RequestFailed, SamplingParams
from headstart.models import builtin, gguf
from headstart.models.llamacpp import native
from headstart.models.llamacpp.native import LlamaFile, LlamaOptions
from headstart.models.llamacpp.runner import LlamaRunner
from headstart.models.llamacpp.sequences import GONE
from headstart.models.load import Loaded, load
from headstart.models.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.llamacpp
PROMPTS = [
    "Repeat exactly: The ferry leaves at nine, the ferry returns at noon, the ferry leaves again at one.",
    "Write one sentence about a lighthouse.",
    "List three colours, then list them again.",
]
TEXTS = [
    "The ferry leaves at nine.",
    "  two spaces, a tab\tand\n\nlines  ",
    "naïve café, déjà vu; Straße; Привет; 漢字かな; עברית",
    "emoji 🙂 family 👩‍👩‍👧‍👦 flag 🇩🇪 done",
    "def f(x):\n    return x[0] + 1234567890\n",
    "<|im_start|>user\nHello<|im_end|>\n",
    "",
]
LENGTH = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=LENGTH)


@pytest.fixture(scope="module", autouse=True)
def _here() -> None:
    if (why_not := native.available()) is not None:
        pytest.skip(why_not)
    if not builtin.path_of(builtin.SMOLLM2).exists() and not os.environ.get(builtin.SMOLLM2.variable):
        pytest.skip("the built-in model is not in the cache")


@pytest.fixture(scope="module")
def target() -> Loaded:
    return load("smollm2", runner="llamacpp", llama=LlamaOptions(threads=1))


@pytest.fixture(scope="module")
def llm(target: Loaded) -> Iterator[LLM]:
    """With itself as its draft: right nearly always, so that much is accepted."""
    draft = load("smollm2", runner="llamacpp", llama=LlamaOptions(threads=1))
    spec = {"method": "draft_model", "num_speculative_tokens": 3}
    with LLM(target, speculative=spec, draft=draft, kv_memory=100 << 20, max_num_seqs=8) as made:
        yield made
        for runner in runners(made):
            check(runner)


@pytest.fixture(scope="module")
def theirs() -> Tokenizer:
    """transformers' tokenizer of the same file."""
    return load_tokenizer(gguf.converted(builtin.ensure(builtin.SMOLLM2)))


def runners(llm: LLM) -> list[LlamaRunner]:
    return [llm.engine.runner, llm.engine.drafting.drafters["draft_model"].runner]


def check(runner: LlamaRunner) -> None:
    """llama.cpp's memory holds what the books say."""
    lib, memory = runner.context.lib, runner.context._memory
    for seq, held in runner.seqs.held.items():
        there = np.flatnonzero(held.slots != GONE)
        first, last = (int(there[0]), int(there[-1])) if len(there) else (-1, -1)
        assert lib.llama_memory_seq_pos_min(memory, seq) == first
        assert lib.llama_memory_seq_pos_max(memory, seq) == last
    for seq in runner.seqs._free:
        assert lib.llama_memory_seq_pos_max(memory, seq) == -1, f"sequence {seq} is free and holds something"
    assert not runner.seqs._busy and not runner.seqs._rows


def chats(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.chat([{"role": "user", "content": p}]) for p in PROMPTS]


class Bare:
    """llama.cpp alone: one sequence, one decode after the other."""

    def __init__(self, file: LlamaFile) -> None:
        self.file, lib = file, file.lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 512, 512, 512, 1, 1
        self.context = lib.llama_init_from_model(file.model, params)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Go on with these tokens."""
        lib = self.file.lib
        room = (ctypes.c_int32 * len(tokens))(*tokens)
        assert lib.llama_decode(self.context, lib.llama_batch_get_one(room, len(tokens))) == 0
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, -1), (self.file.vocab_size,)).copy()

    def compare(self, prompt: list[int], ours: list[int], eos: frozenset[int]) -> None:
        """Every token is the likeliest one, or tied with it within what another order of sums can change."""
        self.file.lib.llama_memory_clear(self.file.lib.llama_get_memory(self.context), True)
        logits = self.logits(prompt)
        for i, token in enumerate(ours):
            best = int(logits.argmax())
            margin = float(logits[best] - logits[token])
            assert token == best or margin < 1e-2, f"token {i}: {token} instead of {best}, margin {margin:.2g}"
            logits = self.logits([token])
        assert len(ours) == LENGTH or ours[-1] in eos

    def close(self) -> None:
        self.file.lib.llama_free(self.context)


# ------------------------------------------------------------------ texts
def test_greedy_is_llama_cpps_own_greedy(llm: LLM, target: Loaded) -> None:
    bare = Bare(target.model)
    prompts = chats(llm)
    for ids, out in zip(prompts, llm.generate(prompts, GREEDY, speculative=False), strict=True):
        bare.compare(ids, out.token_ids, target.eos_ids)
    bare.close()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_is_the_same_every_way(llm: LLM, params: SamplingParams) -> None:
    prompts = chats(llm)
    want = [llm.generate(p, params, speculative=False)[0].token_ids for p in prompts]
    for method in (False, "ngram", "suffix", "draft_model"):
        outs = llm.generate(prompts, params, speculative=method)
        assert [o.token_ids for o in outs] == want, method
        drafted = sum(o.stats.drafted for o in outs)
        assert drafted > 0 or not method
        assert method != "draft_model" or sum(o.stats.accepted for o in outs) > 0.9 * drafted
    for runner in runners(llm):
        check(runner)


def test_trees_give_the_same_text(target: Loaded) -> None:
    spec = {"method": "draft_model", "num_speculative_tokens": 3, "tree": True, "num_draft_nodes": 8, "p_split": 0.02}
    draft = load("smollm2", runner="llamacpp", llama=LlamaOptions(threads=1))
    with LLM(target, speculative=spec, draft=draft, kv_memory=100 << 20, max_num_seqs=4) as llm:
        prompts = chats(llm)
        want = [o.token_ids for o in llm.generate(prompts, SEEDED, speculative=False)]
        outs = llm.generate(prompts, SEEDED)
        assert [o.token_ids for o in outs] == want and sum(o.stats.accepted for o in outs) > 20
        for runner in runners(llm):
            check(runner)


def test_streamed_pieces_join_to_the_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    messages = [{"role": "user", "content": "Answer with five emoji and the word café."}]
    want = llm.chat(messages, params)[0]
    chunks = list(llm.stream(messages, params))
    assert "".join(c.text for c in chunks) == want.text == llm.tokenizer.decode(want.token_ids)
    assert [t for c in chunks for t in c.token_ids] == want.token_ids


def test_the_text_is_sensible_and_ends(llm: LLM) -> None:
    out = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0))[0]
    assert "Paris" in out.text and out.finish_reason == "stop" and out.token_ids[-1] in llm.model.eos_ids


def test_a_second_turn_finds_the_first(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Write one sentence about a small harbour in the north."}]
    first = llm.chat(messages, GREEDY)[0]
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And one about its boats."}]
    for method in (False, "draft_model"):
        second = llm.chat(messages, GREEDY, speculative=method)[0]
        assert second.stats.cached_prompt_tokens >= 32
    with LLM(llm.model, kv_memory=50 << 20, max_num_seqs=1, share_prefixes=False) as fresh:
        assert fresh.chat(messages, GREEDY)[0].token_ids == second.token_ids


def test_what_was_computed_behind_a_copy_is_found(llm: LLM) -> None:
    """A prompt is computed twice, the second time for its logprobs; a third request reads what followed."""
    ids = llm.tokenizer.encode("The old lighthouse stands at the end of a long pier, and every evening its keeper")
    llm.generate(ids, GREEDY, speculative=False)
    longer = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, prompt_logprobs=0)
    second = llm.generate(ids, longer, speculative=False)[0]
    text = [*ids, *second.token_ids]
    third = llm.generate(text, GREEDY, speculative=False)[0]
    assert third.stats.cached_prompt_tokens >= len(text) - 17
    with LLM(llm.model, kv_memory=50 << 20, max_num_seqs=1, share_prefixes=False) as fresh:
        assert fresh.generate(text, GREEDY)[0].token_ids == third.token_ids
    check(llm.engine.runner)


# ------------------------------------------------------------------ tokens
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers(llm: LLM, theirs: Tokenizer, text: str) -> None:
    ours = llm.tokenizer
    ids = ours.encode(text)
    assert ids == theirs.encode(text) and ours.encode(text, special=False) == theirs.encode(text, special=False)
    assert ours.decode(ids, skip_special=False) == text == theirs.decode(ids, skip_special=False)
    assert ours.decode(ids) == theirs.decode(ids)
    for i in range(len(ids)):  # a cut inside a letter shows as such, in both
        assert ours.decode(ids[:i]) == theirs.decode(ids[:i])


def test_the_vocabulary_is_that_of_transformers(llm: LLM, theirs: Tokenizer) -> None:
    ours = llm.tokenizer
    assert theirs.eos_ids <= ours.eos_ids and llm.model.eos_ids == ours.eos_ids
    assert theirs.special_ids <= ours.special_ids and ours.eos_ids <= ours.special_ids
    pieces = theirs.pieces()
    assert len(ours.pieces()) == len(pieces) == llm.model.vocab_size
    assert all(ours.pieces()[t] == pieces[t] for t in range(0, len(pieces), 97))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hello 🙂"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "Three?"},
        ],
    ],
)
def test_the_chat_template_is_that_of_transformers(llm: LLM, theirs: Tokenizer, messages: list[Any]) -> None:
    assert llm.tokenizer.has_chat_template()
    assert llm.tokenizer.chat(messages) == theirs.chat(messages)


def test_messages_that_the_template_cannot_format(llm: LLM) -> None:
    with pytest.raises(BadInput, match="cannot format these messages"):
        llm.tokenizer.chat([{"content": "nobody said this"}, 3])  # type: ignore[list-item]


# ------------------------------------------------------------------ files, leaving, closing
def test_what_the_file_says_of_itself(target: Loaded) -> None:
    file = target.model
    assert file.slot_bytes == 30 * 3 * (64 + 64) * 2 and file.vocab_size == 49152 and target.max_len == file.max_len
    assert 80_000_000 < file.weight_bytes < 100_000_000 and file.meta("general.architecture") == "llama"
    assert file.meta("no.such.key") is None and "Q4_1" in file.describe()


def test_files_that_cannot_be_loaded(target: Loaded, tmp_path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match="llama.cpp cannot load"):
        LlamaFile(tmp_path / "x.gguf", LlamaOptions())
    with pytest.raises(ConfigError, match="positions"):
        load("smollm2", runner="llamacpp", max_len=10**7)


def test_ctrl_c_leaves_nothing_behind(llm: LLM) -> None:
    want = llm.generate(PROMPTS[1], GREEDY)[0].text
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())
    assert llm.generate(PROMPTS[1], GREEDY)[0].text == want
    assert llm.engine.idle and not llm.engine.pool.tables
    for runner in runners(llm):
        check(runner)


def test_closing_frees_and_the_file_serves_another(target: Loaded) -> None:
    for kv_type in (LlamaOptions(), LlamaOptions(kv_type="q8_0", threads=1, flash_attention=True)):
        loaded = load("smollm2", runner="llamacpp", llama=kv_type) if kv_type != LlamaOptions() else target
        with LLM(loaded, kv_memory=40 << 20, max_num_seqs=2) as made:
            stream = made.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
            assert next(stream).token_ids
        assert made.engine.runner.context is None and not made.engine.pool.tables
        with pytest.raises(RequestFailed, match="closed"):
            list(stream)
        with pytest.raises(RequestFailed, match="closed"):
            made.generate(PROMPTS[0], GREEDY)
