"""Tiny random models of many architectures, and drafters that tests need: helpful ones, random ones and hostile ones."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import numpy as np
import torch

from headstart.core import Draft, Tree
from headstart.drafters import Drafter

VOCAB = 211
DEVICE = os.environ.get("HEADSTART_TEST_DEVICE", "cpu")  # "cuda" runs the engine's tests on a GPU
_LLAMA = dict(
    hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, eos_token_id=0, bos_token_id=0,
)  # fmt: skip
_WINDOW = _LLAMA | {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_OLD = dict(vocab_size=VOCAB, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
_SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=512)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": None},
    "mistral+window": _LLAMA | {"sliding_window": 8},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": _LLAMA,
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW,
    "olmo2": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "gpt2": dict(n_embd=48, n_layer=3, n_head=4, n_positions=512, **_OLD),
    "gpt_neox": dict(intermediate_size=96, **_SMALL, **_OLD),
    "opt": dict(ffn_dim=96, word_embed_proj_dim=48, vocab_size=VOCAB, init_std=0.3, eos_token_id=0, **_SMALL),
    "qwen3_moe": _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": dict(
        intermediate_size=96, moe_intermediate_size=32, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, **_SMALL, **_OLD,
    ),
}  # fmt: skip


@functools.cache
def _made(name: str, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.split("+")[0], **copy.deepcopy(CONFIGS[name]))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(DEVICE)


def model(name: str = "llama", seed: int = 0) -> Any:
    """A fresh copy of a tiny model with its stock attention."""
    return copy.deepcopy(_made(name, seed))


def noisy(name: str = "llama", seed: int = 0, strength: float = 0.02) -> Any:
    """A model that mostly agrees with `model(name, seed)`: a plausible draft for it."""
    out = model(name, seed)
    torch.manual_seed(99)
    with torch.no_grad():
        for p in out.parameters():
            p.mul_(1 + strength * torch.randn_like(p))
    return out


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token prompts of different lengths; every other one repeats itself, so that lookups find something."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        part = rng.integers(5, VOCAB - 5, size=int(rng.integers(5, 14))).tolist()
        out.append(part * 3 if i % 2 else part + rng.integers(5, VOCAB - 5, size=9).tolist())
    return out


# ------------------------------------------------------------------ drafters
class Oracle(Drafter):
    """Knows the right continuation (`known[prompt]`) and hides it in a tree among wrong siblings."""

    known: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012

    def propose(self, view):
        return Draft.of([self._tree(r) for r in view.requests])

    def _tree(self, r):
        right = self.known[tuple(r.tokens[: r.num_prompt])][len(r.tokens) - r.num_prompt :][:4]
        tree, parent = Tree(), -1
        for i, token in enumerate(right):
            wrong = (token + 1 + i) % min(VOCAB, self.around.vocab_size)
            tree.tokens += [wrong, wrong, token] if i % 2 else [wrong, token]
            tree.parents += [parent] * (3 if i % 2 else 2)
            parent = len(tree) - 1
        tree.tokens += [7, 8]
        tree.parents += [0, len(tree.parents)] if tree.parents else [-1, 0]
        return tree


class RandomTrees(Drafter):
    """Random trees of random tokens, often right by chance: tokens come from the request's own text."""

    def propose(self, view):
        trees = []
        for r in view.requests:
            rng = np.random.default_rng([r.seed & 0xFFFF, len(r.tokens)])
            size = int(rng.integers(0, r.budget + 1))
            tokens = rng.choice(np.array(r.tokens), size=size).tolist()
            trees.append(Tree(tokens, [int(rng.integers(-1, i)) if i else -1 for i in range(size)]))
        return Draft.of(trees)


class AlwaysWrong(Drafter):
    """Never what the target says, unless by accident; as wide as it is deep."""

    def propose(self, view):
        return Draft.of([Tree([3] * r.budget, [i // 2 - 1 for i in range(r.budget)]) for r in view.requests])


class OverBudget(Drafter):
    """Ten times what it was allowed, with duplicates and EOS in the middle."""

    def propose(self, view):
        chains = [([0, 5, 5, 0] * (10 * r.budget))[: 10 * r.budget] for r in view.requests]
        return Draft.chains(chains)


class EndsInEos(Drafter):
    def propose(self, view):
        return Draft.of([Tree([0, 0, 0, 5], [-1, 0, 1, 2]) for r in view.requests])


class NoTree(Drafter):
    """A parent behind its child, a token outside the vocabulary: not a tree at all."""

    def propose(self, view):
        return Draft.of([Tree([5, VOCAB + 50], [1, -1]) for _ in view.requests])


class Raises(Drafter):
    def propose(self, view):
        raise RuntimeError("broken on purpose")


class ObserveRaises(RandomTrees):
    def observe(self, view, trees, verdicts):
        raise RuntimeError("cannot bear the truth")


class ReleaseRaises(RandomTrees):
    def release(self, request):
        raise RuntimeError("cannot let go")


class TooFew(Drafter):
    def propose(self, view):
        return Draft.chains([])


_HOSTILE = (AlwaysWrong, OverBudget, EndsInEos, NoTree, Raises, TooFew, ObserveRaises, ReleaseRaises)
HOSTILE = {c.__name__: f"tests.tiny.{c.__name__}" for c in _HOSTILE}


# ------------------------------------------------------------------ tokenizers and folders
CORPUS = [
    "the quick brown fox jumps over the lazy dog", "a stone bridge over the river", "the birds sing in the green valley",
    "she sells sea shells by the sea shore", "how much wood would a woodchuck chuck", "numbers like 1 2 3 and 4 5 6",
    "naïve café, déjà vu", "the lighthouse keeper writes down the weather each morning",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


@functools.cache
def tokenizer(size: int = 400, style: str = "bytes") -> Any:
    """A small tokenizer trained on the corpus: byte-level BPE, or sentencepiece-like with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if style == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [f"<0x{b:02X}>" for b in range(256)]
    extra = [] if style == "bytes" else ["<unk>", *alphabet]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, *extra], show_progress=False,
        initial_alphabet=sorted(alphabet) if style == "bytes" else [],
    )  # fmt: skip
    made.train_from_iterator(CORPUS * 3, trainer)
    out = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    out.chat_template = TEMPLATE
    return out


def folder(path: Any, name: str = "llama", size: int = 400, seed: int = 0) -> Any:
    """A tiny model with a tokenizer, saved as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    words = tokenizer(size)
    torch.manual_seed(seed)
    options = copy.deepcopy(CONFIGS[name]) | {"vocab_size": len(words), "eos_token_id": 0}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options)).eval()
    made.save_pretrained(path)
    words.save_pretrained(path)
    return path


def loaded(size: int = 400, style: str = "bytes", seed: int = 0, layers: int = 3) -> Any:
    """A tiny model with a tokenizer, in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headstart.models.load import wrap
    from headstart.models.tokenizer import Tokenizer

    words = tokenizer(size, style)
    torch.manual_seed(seed)
    made = LlamaForCausalLM(LlamaConfig(**_LLAMA | {"vocab_size": len(words), "num_hidden_layers": layers})).eval()
    return wrap(f"tiny-{style}-{size}", made, Tokenizer(words))


def with_tools(sign: str) -> Any:
    """The same, with a chat template that says this where there are tools."""
    out = loaded()
    out.tokenizer.hf = copy.deepcopy(out.tokenizer.hf)  # others use it, too
    out.tokenizer.hf.chat_template = "{% if tools %}" + sign + "{% endif %}" + TEMPLATE
    return out


def eagle(
    target: Any, taps: tuple[int, ...], tokens: list[int] | None = None, seed: int = 3, layers: int = 1, head_dim: int = 8,
    **flags: bool,
) -> Any:  # fmt: skip
    """An EAGLE-3 head for a target of this config, with random weights, loud enough that drafts depend on all that it reads.
    `tokens`: its vocabulary, in ascending order; None: the target's."""
    from transformers import LlamaConfig

    from headstart.models.heads import HeadSpec
    from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head

    size, vocab = target.hidden_size, target.vocab_size
    config = LlamaConfig(
        hidden_size=size, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, vocab_size=vocab, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(seed)
    spec = HeadSpec("eagle3", size, vocab, vocab if tokens is None else len(tokens), taps)
    head = Eagle3Head(spec, config, Eagle3Flags(**flags))
    for p in head.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.3)
    if tokens is not None:
        head.d2t.copy_(torch.tensor(tokens) - torch.arange(len(tokens)))
    return head.eval()
