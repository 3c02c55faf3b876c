"""A small draft model of the transformers kind, distilled from the target: at each place of the answers it learns to say what
the target says there.

The student is a model that exists and speaks the target's tokens, or a new one of the target's own architecture with fewer
layers, and narrower if asked. A new one of the target's width begins with its embeddings, its first layers and its output.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.errors import BadInput, ConfigError
from headstart.models import vocab
from headstart.models.load import Loaded, load, resolve, wrap
from headstart.models.tokenizer import Tokenizer, load_tokenizer
from headstart.progress import note
from headstart.train.options import Options
from headstart.train.packing import Batch, Document
from headstart.train.student import Student, place
from headstart.train.target import forward

GENTLE = 0.1  # of the learning rate, for a student that can write already


@dataclass(frozen=True)
class DraftOptions(Options):
    kind = "draft"
    least = Options.least | {"layers": 1, "hidden": 1}

    draft: str | None = None  # a model to go on from
    layers: int | None = None  # or: of a new one, made after the target
    hidden: int | None = None  # its width; None: the target's

    def check(self) -> None:
        super().check()
        if self.draft is None and self.layers is None:
            raise ConfigError(
                "There is no student yet: name a small model (--draft), or say how many layers a new one has (--layers)."
            )
        if self.draft is not None and (self.layers, self.hidden) != (None, None):
            raise ConfigError(
                "A model that exists has its shape already: leave out --layers and --hidden, or leave out --draft."
            )
        if self.draft is not None and Path(self.draft).expanduser().resolve() == Path(self.out).expanduser().resolve():
            raise ConfigError(f"out={self.out!r} is the folder of the draft itself: choose another, to keep both.")

    def check_target(self) -> None:
        from transformers import AutoConfig

        folder = resolve(self.target)
        if self.layers is not None:
            config = AutoConfig.from_pretrained(folder).get_text_config()
            student_config(config, self.target, self.layers, self.hidden)
        elif self.draft is not None:
            tokenizers = load_tokenizer(folder), load_tokenizer(resolve(self.draft))
            check_vocabulary(self.target, tokenizers[0], self.draft, tokenizers[1])

    def default_rate(self, hidden_size: int) -> float:
        return super().default_rate(self.hidden or hidden_size) * (1 if self.draft is None else GENTLE)

    def begin(self, target: Loaded, docs: Sequence[Document]) -> DraftStudent:
        student = self._given(target) if self.draft is not None else self._new(target)
        longest = max(len(d.tokens) for d in docs)
        if longest > student.max_len:
            raise BadInput(
                f"The answers have up to {longest} tokens, but {student.name} takes {student.max_len}: lower the length."
            )
        place(student.model.eval().requires_grad_(True), target.model.device, target.model.dtype)
        return DraftStudent(student, target)

    def _given(self, target: Loaded) -> Loaded:
        assert self.draft is not None
        student = load(self.draft, target.model.device, target.model.dtype, runner="torch")
        refuse_quantised(student.name, student.model)
        if target.tokenizer is not None:
            check_vocabulary(target.name, target.tokenizer, student.name, student.tokenizer)
        return student

    def _new(self, target: Loaded) -> Loaded:
        assert self.layers is not None
        refuse_quantised(target.name, target.model)
        model = make_student(target.model, target.name, self.layers, self.hidden)
        return wrap(f"a draft of {self.layers} layers", model, target.tokenizer)


class DraftStudent(Student):
    title, method, format = "Draft model", "draft_model", "that of transformers"

    def __init__(self, student: Loaded, target: Loaded) -> None:
        size = min(student.vocab_size, target.vocab_size)  # rows beyond the tokens that both have are padding
        same = size == target.vocab_size
        targets = None if same else torch.arange(size, device=target.model.device)
        super().__init__(student.model, size, targets=targets)
        self.loaded = student

    @property
    def drafter(self) -> Loaded:
        return self.loaded

    def states(self, features: torch.Tensor, batch: Batch, levels: int) -> Iterator[torch.Tensor]:
        """One forward along the text serves all levels: a draft that was right so far has read just that."""
        out = forward(self.module, batch).logits.flatten(0, 1)
        for _, places in batch.levels[:levels]:
            yield out[batch.asked[places]]

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return state[:, : self.vocab]

    def activations(self, batch: int, length: int) -> int:
        model: Any = self.module
        config, size = model.config.get_text_config(), next(model.parameters()).element_size()
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        layers = config.num_hidden_layers * size * (20 * config.hidden_size + 4 * inner)
        return batch * length * (layers + 2 * size * config.vocab_size)

    def save(self, folder: Path, target_name: str) -> None:
        model: Any = self.module
        model.save_pretrained(folder)
        if self.loaded.tokenizer is not None:
            self.loaded.tokenizer.hf.save_pretrained(folder)


# ------------------------------------------------------------------ a new one
def make_student(target: Any, name: str, layers: int, hidden: int | None) -> Any:
    """The target's architecture with its first layers only; of another width it begins at random."""
    from transformers import AutoModelForCausalLM

    config = student_config(target.config.get_text_config(), name, layers, hidden)
    try:
        model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"transformers makes no draft of this shape from {name} ({why}): name a small model with --draft instead."
        ) from error
    model.generation_config = copy.deepcopy(target.generation_config)
    copied = 0
    if hidden in (None, target.config.get_text_config().hidden_size):
        copied = copy_weights(target, model)
    note(
        f"The draft has {model.num_parameters() / 1e6:.1f} million weights, {copied / 1e6:.1f} million of them copied from "
        f"{name}, which has {target.num_parameters() / 1e6:.1f} million."
    )
    return model


def student_config(target: Any, name: str, layers: int, hidden: int | None) -> Any:
    config = copy.deepcopy(target)
    count = config.num_hidden_layers
    if layers > count:
        raise ConfigError(f"layers={layers}, but {name} has {count}: a draft has at most as many.")
    config.num_hidden_layers = layers
    for key, value in vars(target).items():  # such as layer_types
        if isinstance(value, list) and len(value) == count:
            setattr(config, key, value[:layers])
    if hidden is not None:
        set_width(config, hidden)
    return config


def set_width(config: Any, hidden: int) -> None:
    """Fewer heads of the same size, and an MLP that is narrower to the same degree."""
    heads, old = config.num_attention_heads, config.hidden_size
    dim = getattr(config, "head_dim", None) or old // heads
    if hidden % dim:
        raise ConfigError(
            f"hidden={hidden} cannot be split into heads of {dim} as the target's are: use a multiple of {dim}."
        )
    config.hidden_size, config.num_attention_heads = hidden, hidden // dim
    if (shared := getattr(config, "num_key_value_heads", None)) is not None:
        config.num_key_value_heads = max(k for k in range(1, shared + 1) if config.num_attention_heads % k == 0)
    if (inner := getattr(config, "intermediate_size", None)) is not None:
        config.intermediate_size = max(1, inner * hidden // old)


def copy_weights(target: Any, student: Any) -> int:
    """Take over every tensor that both have by name and shape; returns how many numbers."""
    own = student.state_dict()
    shared = {n: t for n, t in target.state_dict().items() if n in own and t.shape == own[n].shape}
    student.load_state_dict(shared, strict=False)
    return sum(p.numel() for n, p in student.named_parameters() if n in shared)


# ------------------------------------------------------------------ what cannot be
def check_vocabulary(target_name: str, target: Tokenizer, name: str, student: Tokenizer) -> None:
    found = vocab.map_vocab(target, student, len(target.pieces()), len(student.pieces()))
    if found.kind != vocab.SAME:
        raise ConfigError(
            f"{name} has other tokens than {target_name} ({found.overlap:.0%} are shared), so it cannot learn from it: "
            "choose a model with the same tokenizer, or make one with --layers."
        )


def refuse_quantised(name: str, model: Any) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{name} is quantised, and such weights cannot be trained: use the model in its full precision."
        )
