"""EAGLE-3: how a head begins, what it computes in a step of training, and how well it foresees held-out text.

Training-time test (arXiv 2503.01840): a head that drafts a chain reads its own states from the second token on. So it is
trained on them: level 0 from the target's features, level k from its states of level k - 1, each compared with the target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from headstart.models.heads import HeadSpec
from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head
from headstart.train.chains import Chains
from headstart.train.losses import Loss
from headstart.train.packing import Batch, Document
from headstart.train.scores import Scores, Tally
from headstart.train.target import Lesson, Teacher

RESIDUAL_GAIN = 0.1  # of what layers add to the residual, at the start


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


def place(head: Eagle3Head, device: torch.device, dtype: torch.dtype) -> Eagle3Head:
    """On a device, weights in a dtype; the angles of the positions stay in float32."""
    for p in head.parameters():
        p.data = p.data.to(dtype)
    return head.to(device)


# ------------------------------------------------------------------ a step
def states(head: Eagle3Head, features: torch.Tensor, batch: Batch, levels: int) -> Iterator[torch.Tensor]:
    """(T, hidden) states of each level: that of row t at level k has read the tokens up to t + 1 + k."""
    context, positions = Chains(batch.docs), batch.positions.flatten()
    state = head.begin(features)
    for level in range(levels):
        state = head.advance(level, state, batch.tokens_after(level + 1), positions + level, context)
        yield state


def step_losses(
    head: Eagle3Head, lesson: Lesson, batch: Batch, levels: int, loss: Loss, noise: float = 0.0
) -> torch.Tensor:
    """(levels,) mean loss of the rows that count at each level."""
    features = lesson.features.to(head.fc.weight.dtype)
    if noise:
        features = features + noise * features.std() * torch.randn_like(features)
    out = []
    for level, state in enumerate(states(head, features, batch, levels)):
        rows, places = batch.levels[level]
        ours = head.logits(level, state.index_select(0, rows)).float().log_softmax(-1)
        out.append(loss(ours, lesson.log_probs[places]).sum() / max(1, len(rows)))
    return torch.stack(out)


def level_weights(levels: int, decay: float) -> torch.Tensor:
    """How much each level's loss counts; they sum to one."""
    weights = decay ** torch.arange(levels, dtype=torch.float32)
    return weights / weights.sum()


# ------------------------------------------------------------------ held-out text
@torch.no_grad()
def evaluate(head: Eagle3Head, teacher: Teacher, groups: Sequence[Batch], loss: Loss, device: torch.device) -> Scores:
    """Losses and agreement by level, and tokens per step of a greedy chain as long as the batches have levels."""
    tally = Tally(len(groups[0].levels), any(p.greedy for batch in groups for p in batch.where))
    for cpu_batch in groups:
        batch = cpu_batch.to(device)
        lesson = teacher.teach(batch)
        features = lesson.features.to(head.fc.weight.dtype)
        for level, state in enumerate(states(head, features, batch, tally.levels)):
            rows, places = batch.levels[level]
            logits = head.logits(level, state.index_select(0, rows)).float()
            guess = logits.argmax(-1) if head.targets is None else head.targets[logits.argmax(-1)]
            losses = loss(logits.log_softmax(-1), lesson.log_probs[places])
            text = batch.tokens.flatten()[batch.asked[places] + 1]
            tally.add(
                cpu_batch, level, losses.sum().item(), (guess == lesson.best[places]).cpu(), (guess == text).cpu()
            )
        tally.walk(cpu_batch)
    return tally.scores()
