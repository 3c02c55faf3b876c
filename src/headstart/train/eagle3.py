"""EAGLE-3: a head that reads three of the target's layers, and from the second token on its own states.

Training-time test (arXiv 2503.01840): a head that drafts a chain reads its own states from the second token on. So it is
trained on them: level 0 from the target's features, level k from its states of level k - 1, each compared with the target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.errors import ConfigError
from headstart.models.heads import HeadSpec
from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head
from headstart.models.heads.save import save_eagle3
from headstart.models.load import Loaded
from headstart.progress import note
from headstart.train.options import HeadOptions
from headstart.train.packing import Document
from headstart.train.student import HeadStudent, place

RESIDUAL_GAIN = 0.1  # of what layers add to the residual, at the start


@dataclass(frozen=True)
class Eagle3Options(HeadOptions):
    kind = "eagle3"
    least = HeadOptions.least | {"draft_vocab": 1, "layers": 1, "intermediate": 1, "heads": 1}

    embeddings: bool = True  # written with the head; without them it is much smaller, and takes the target's
    draft_vocab: int = 16384
    taps: tuple[int, ...] | None = None
    layers: int = 1
    intermediate: int | None = None
    heads: int | None = None
    norm_before_residual: bool = True
    norm_before_fc: bool = True
    fc_norm: bool = False
    norm_output: bool = True
    learn_output: bool = True  # the matrix behind the logits; otherwise it stays the target's, and need not be kept
    lean: bool = False  # written without embeddings and output matrix: Headstart takes the target's

    def check(self) -> None:
        super().check()
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError(
                "norm_before_fc and fc_norm exclude each other: the format of the result has one of them."
            )
        if self.lean and self.learn_output:
            raise ConfigError(
                "A lean head has no output matrix in its file, but this one is learned and would be lost: "
                "add --no-learn-output (learn_output=False), or leave out --lean."
            )

    def begin(self, target: Loaded, docs: Sequence[Document]) -> Eagle3Student:
        model = target.model
        vocab = model.get_input_embeddings().weight.shape[0]
        always = target.eos_ids | (target.tokenizer.special_ids if target.tokenizer else frozenset())
        choices = draft_vocabulary(docs, min(self.draft_vocab, vocab), vocab, sorted(always))
        taps = self.taps or default_taps(model.config.get_text_config().num_hidden_layers)
        layers = layer_config(model.config, self.layers, self.intermediate, self.heads)
        flags = Eagle3Flags(self.norm_before_residual, self.norm_before_fc, self.fc_norm, self.norm_output)
        head = make_head(model, layers, flags, taps, choices, self.target_name(target))
        head.lm_head.weight.requires_grad_(self.learn_output)
        place(head, model.device, model.dtype)
        say_coverage(docs, choices)
        return Eagle3Student(head, self)


class Eagle3Student(HeadStudent):
    title, method, format = "EAGLE-3 head", "eagle3", "vLLM's speculators"
    module: Eagle3Head

    def __init__(self, head: Eagle3Head, options: Eagle3Options) -> None:
        super().__init__(head, options.levels, options.decay, options.noise)
        self.options = options
        if options.lean:
            self.format += " without embeddings and output matrix, which Headstart takes from the target"

    def activations(self, batch: int, length: int) -> int:
        config, size = self.module.config, self.module.fc.weight.element_size()
        scores = batch * config.num_attention_heads * length**2 * (self.levels - 1) * (2 * size + 4)
        layers = batch * length * self.levels * size * (20 * config.hidden_size + 4 * config.intermediate_size)
        return config.num_hidden_layers * (scores + layers)

    def save(self, folder: Path, target_name: str) -> None:
        how = self.options
        save_eagle3(
            self.module, folder, target_name, how.eval_depth, how.embeddings and not how.lean, output=not how.lean
        )


# ------------------------------------------------------------------ the head at the start
def draft_vocabulary(docs: Iterable[Document], size: int, vocab: int, always: Iterable[int]) -> torch.Tensor:
    """The `size` tokens that answers use most, in the target's order. Those of `always` that occur are in in any case."""
    counts: Counter[int] = Counter()
    for doc in docs:
        counts.update(doc.tokens[doc.answer :])
    first = [t for t in always if t in counts]
    ranked = sorted(set(range(vocab)) - set(first), key=lambda t: (-counts[t], t))
    return torch.tensor(sorted((first + ranked)[:size]))


def layer_config(target: Any, layers: int, intermediate: int | None, heads: int | None) -> Any:
    """Llama layers of the target's width, with its RoPE."""
    from transformers import LlamaConfig

    own = target.get_text_config()
    size = own.hidden_size
    num_heads = heads or own.num_attention_heads
    dim = size // heads if heads else getattr(own, "head_dim", None) or size // num_heads
    kv_heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
    rope = getattr(own, "rope_parameters", None) or {}
    return LlamaConfig(
        hidden_size=size,
        intermediate_size=intermediate or getattr(own, "intermediate_size", None) or 4 * size,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads if num_heads % kv_heads == 0 else num_heads,
        head_dim=dim,
        vocab_size=own.vocab_size,
        rms_norm_eps=getattr(own, "rms_norm_eps", 1e-6),
        max_position_embeddings=getattr(own, "max_position_embeddings", 2048),
        rope_parameters=dict(rope) if "rope_type" in rope else {"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    )


def make_head(
    target: Any, config: Any, flags: Eagle3Flags, taps: tuple[int, ...], choices: torch.Tensor, name: str
) -> Eagle3Head:
    """A head that has learned nothing but the target's embeddings, its final norm and its rows of the output matrix."""
    vocab = target.get_input_embeddings().weight.shape[0]
    spec = HeadSpec("eagle3", config.hidden_size, vocab, len(choices), taps, target=name)
    config.vocab_size = vocab
    head = Eagle3Head(spec, config, flags)
    _begin_weights(head)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[choices.to(target.device)])
        norm = getattr(target.base_model, "norm", None)
        if norm is not None and norm.weight.shape == head.norm.weight.shape:
            head.norm.weight.copy_(norm.weight)
    if len(choices) != vocab:
        head.d2t = choices - torch.arange(len(choices))
        head.t2d = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, choices, True)
    head.embed_tokens.weight.requires_grad_(False)
    return head


def _begin_weights(head: Eagle3Head) -> None:
    """Products keep the size of what they read; what layers add to the residual begins small."""
    for name, module in head.named_modules():
        if isinstance(module, torch.nn.Linear):
            small = name.endswith(("o_proj", "down_proj"))
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5 * (RESIDUAL_GAIN if small else 1.0))


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high, as speculators and vLLM choose them."""
    return (2, num_layers // 2, num_layers - 3) if num_layers > 5 else (1, (num_layers + 1) // 2, num_layers)


def say_coverage(docs: Iterable[Document], choices: torch.Tensor) -> None:
    known, used = set(choices.tolist()), [t for d in docs for t in d.tokens[d.answer :]]
    share = sum(t in known for t in used) / len(used)
    note(f"The draft vocabulary of {len(choices)} tokens covers {100 * share:.2f}% of the answers.")
