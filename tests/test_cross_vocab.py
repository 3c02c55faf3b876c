"""A draft with another vocabulary: token-level and string-level mapping, exact either way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headstart import LLM, ConfigError, SamplingParams
from headstart.core import Batch, Segment
from headstart.models import vocab
from headstart.models.tokenizer import Tokenizer
from tests import tiny

TEXTS = ["the quick brown fox jumps", "a stone bridge over the river", "she sells sea shells by", "naïve café, déjà"]


def mapping(style: str, size: int, kind: str = "auto") -> vocab.VocabMap:
    target, draft = Tokenizer(tiny.tokenizer(400)), Tokenizer(tiny.tokenizer(size, style))
    return vocab.map_vocab(target, draft, len(target.hf), len(draft.hf), kind)


def test_kinds_are_recognised() -> None:
    assert mapping("bytes", 400).kind == vocab.SAME
    smaller = mapping("bytes", 330)
    assert smaller.kind == vocab.TOKEN and 0.5 < smaller.overlap < 1
    assert "single tokens are mapped" in smaller.describe()
    assert mapping("bytes", 330, "string").kind == vocab.STRING
    other = mapping("sentencepiece", 500)
    assert 0 < other.overlap < 1


def test_byte_level_and_sentencepiece_tokens_meet_by_their_bytes() -> None:
    target, draft = Tokenizer(tiny.tokenizer(400)), Tokenizer(tiny.tokenizer(500, "sentencepiece"))
    found = mapping("sentencepiece", 500)
    mine = vocab.token_bytes(target.pieces(), target.special_ids)
    theirs = vocab.token_bytes(draft.pieces(), draft.special_ids)
    assert any(mine[t] == b" the" for t in found.to_draft if t in mine)
    for t, d in found.to_draft.items():
        if t in mine:
            assert mine[t] == theirs[d]


def test_padding_of_the_output_layer_is_no_difference() -> None:
    target, draft = Tokenizer(tiny.tokenizer(400)), Tokenizer(tiny.tokenizer(400))
    found = vocab.map_vocab(target, draft, 512, 448)
    import torch

    assert found.kind == vocab.SAME
    lifted = found.lift(torch.zeros(2, 448))
    assert lifted.shape == (2, 512) and lifted[0, 448:].isinf().all()


@torch.inference_mode()
def assert_pages_hold_their_text(drafter) -> None:
    """Every sealed page of the draft's pool holds the keys that a fresh forward computes for its text."""
    pool, runner = drafter.pool, drafter.runner
    texts = {0: ()}
    for (before, tokens), (_, serial) in sorted(pool._sealed.items(), key=lambda x: x[1][1]):
        texts[serial] = texts.get(before, (None,)) + tokens
    checked = 0
    for page, serial in pool._sealed.values():
        text = texts[serial]
        if None in text:  # its beginning was evicted
            continue
        kept = runner.keys[0][page * pool.page_size : (page + 1) * pool.page_size].clone()
        n = len(text)
        slots = np.arange(runner.keys[0].shape[0] - n, runner.keys[0].shape[0])
        saved = [(t, t[slots].clone()) for t in (*runner.keys, *runner.values)]
        runner.forward(Batch(np.array(text), np.arange(n), [Segment(0, n, 0, slots)], np.array([n - 1])))
        fresh = runner.keys[0][slots[-pool.page_size :]].clone()
        for tensor, old in saved:
            tensor[slots] = old
        torch.testing.assert_close(kept, fresh, atol=1e-4, rtol=1e-4)
        checked += 1
    assert checked > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("style", "size", "kind"),
    [
        ("bytes", 330, "token"),
        ("bytes", 330, "string"),
        ("sentencepiece", 500, "auto"),
        ("sentencepiece", 500, "string"),
    ],
)
def test_text_is_the_targets_own(style, size, kind, temperature, capsys) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=3, ignore_eos=True)
    with LLM(tiny.loaded(), speculative=None, kv_memory=1 << 22) as plain:
        want = [o.token_ids for o in plain.generate(TEXTS, params)]
    spec = {"method": "draft_model", "num_speculative_tokens": 3, "vocab_mapping": kind}
    with LLM(
        tiny.loaded(), speculative=spec, draft=tiny.loaded(size, style, layers=2), kv_memory=1 << 22, page_size=4
    ) as llm:
        outs = llm.generate(TEXTS, params)
        assert [o.token_ids for o in outs] == want
        assert sum(o.stats.drafted for o in outs) > 0
        drafter = llm.engine.drafting.drafters["draft_model"]
        drafter.pool.check_integrity()
        assert_pages_hold_their_text(drafter)
    assert "another vocabulary" in capsys.readouterr().err


def test_a_trees_tokens_must_be_mappable() -> None:
    spec = {"method": "draft_model", "tree": True, "vocab_mapping": "string"}
    with pytest.raises(ConfigError, match="tree drafts need"):
        LLM(tiny.loaded(), speculative=spec, draft=tiny.loaded(330), kv_memory=1 << 22)


def test_the_same_weights_agree_across_vocabularies() -> None:
    """A draft that is the target itself, seen through the text: drafts are nearly always right."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for kind in ("token", "string"):
        spec = {"method": "draft_model", "num_speculative_tokens": 3, "vocab_mapping": kind}
        with LLM(tiny.loaded(), speculative=spec, draft=tiny.loaded(), kv_memory=1 << 22) as llm:
            outs = llm.generate(TEXTS[:3], params)
        accepted = sum(o.stats.accepted for o in outs)
        if kind == "token":
            assert accepted > 0.8 * sum(o.stats.drafted for o in outs)
        else:
            assert accepted > 0
