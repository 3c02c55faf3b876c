"""Runs any transformers causal model over a pool of KV slots: pack a batch in, logits out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from headstart.core import Batch, Forward
from headstart.errors import ModelError
from headstart.models import attention, looped, quantized
from headstart.models.attention import Attends, Context, LayerShape, Probe
from headstart.models.base import Runner
from headstart.models.lean import LeanModel, lean
from headstart.models.looped import LoopedModel


class TorchRunner(Runner):
    """One transformers model and its KV tensors, on CPU or GPU."""

    def __init__(self, model: Any, fuse: bool = True, wide: bool = False, quantize: str | None = None) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.text_config = self.model.config.get_text_config()
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.shapes = probe(self.model, self.text_config.num_hidden_layers)
        self._stack = find_stack(self.model, len(self.shapes))
        self.num_layers = len(self.shapes) if self._stack else 0
        self.lean: LeanModel | None = lean(self.model, wide and not quantize, self._kind()) if fuse else None
        if quantize:
            quantized.quantize(self.model, self.lean, quantize)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def _kind(self) -> type[LeanModel]:
        """Loops where they can be compiled, on CPUs in float32."""
        fits = self.device.type == "cpu" and self.dtype == torch.float32
        return LoopedModel if fits and looped.available() else LeanModel

    @property
    def slot_bytes(self) -> int:
        return sum(s.slot_bytes for s in self.shapes)

    @property
    def weight_bytes(self) -> int:
        """What is held for the model, quantised weights and a second copy for several rows included."""
        products = self.lean.products if self.lean else []
        held = [*self.model.parameters(), *(p.weight for p in products)]
        seen = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}
        return sum(seen.values()) + sum(p.extra_bytes for p in products)

    def allocate(self, num_slots: int, page_size: int = 16, max_rows: int = 512, max_segments: int = 64) -> None:
        """Make the KV tensors, zeroed: a masked slot must not hold NaN."""
        self.release()
        with torch.inference_mode():
            self.keys = [self._zeros(num_slots, s.kv_heads, s.key_dim, s.dtype) for s in self.shapes]
            self.values = [self._zeros(num_slots, s.kv_heads, s.value_dim, s.dtype) for s in self.shapes]

    def _zeros(self, slots: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """On a CPU the system hands out zeroed pages when they are first used; torch.zeros would touch them all now."""
        if self.device.type != "cpu":
            return torch.zeros(slots, heads, dim, dtype=dtype, device=self.device)
        raw = np.zeros(slots * heads * dim * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(slots, heads, dim)

    def warm_up(self, nodes: int, trees: bool, taps: tuple[int, ...] = ()) -> None:
        if isinstance(self.lean, LoopedModel):
            self.lean.warm_up()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Forward:
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        positions = torch.from_numpy(batch.positions).to(self.device)
        rows = torch.from_numpy(batch.rows).to(self.device)
        context = Context(batch, self.keys, self.values, self.device)
        if self.lean is not None:
            return Forward(*self.lean(tokens, positions, context, rows, batch.hidden_layers, batch.layers))
        return Forward(*self._model(tokens, positions, context, rows, batch.hidden_layers, batch.layers))

    def _model(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Attends,
        rows: torch.Tensor | None,
        taps: tuple[int, ...],
        layers: int | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The transformers model's own forward."""
        with self._cut_off(layers):
            out = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
                context=context,
                output_hidden_states=bool(taps),
            )
        return out.logits[0], {i: out.hidden_states[i][0] for i in taps}

    @contextlib.contextmanager
    def _cut_off(self, layers: int | None) -> Iterator[None]:
        """The model has its first layers only, meanwhile."""
        if layers is None:
            yield
            return
        assert self._stack is not None
        parent, name = self._stack
        whole = getattr(parent, name)
        setattr(parent, name, whole[:layers])
        try:
            yield
        finally:
            setattr(parent, name, whole)

    @torch.inference_mode()
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        if not len(source):
            return
        src, dst = torch.from_numpy(source).to(self.device), torch.from_numpy(target).to(self.device)
        for pool in (*self.keys, *self.values):
            pool.index_copy_(0, dst, pool.index_select(0, src))

    def release(self) -> None:
        self.keys, self.values = [], []
        if self.lean is not None:
            self.lean.release()

    def free_cached(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def find_stack(model: nn.Module, num_layers: int) -> tuple[nn.Module, str] | None:
    """Where a model keeps the list of its layers, whatever it calls it; None where it has no such list."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers and _attend_in_order(child):
                return parent, name
    return None


def _attend_in_order(layers: nn.ModuleList) -> bool:
    """Has each of these layers an attention that carries its number?"""
    return all(any(getattr(m, "layer_idx", None) == i for m in layer.modules()) for i, layer in enumerate(layers))


@torch.inference_mode()
def probe(model: Any, num_layers: int) -> list[LayerShape]:
    """Switch the model to our attention and learn each layer's KV shape from one token; refuse what cannot work."""
    name = type(model).__name__
    if not model.is_backend_compatible():
        raise ModelError(
            f"{name} does not take a custom attention function in transformers, so Headstart cannot run it. "
            "Architectures built on the attention interface work (Llama, Mistral, Qwen, Gemma, Phi-3, GPT-2, ...)."
        )
    attention.register()
    model.set_attn_implementation(attention.NAME)
    if model.config._attn_implementation != attention.NAME:
        raise ModelError(f"{name} refused the attention function (see transformers' warning); it cannot run here.")
    seen, device = Probe(), next(model.parameters()).device
    try:
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        model(input_ids=zero, position_ids=zero, use_cache=False, context=seen)
    except Exception as error:
        raise ModelError(f"{name} failed on a single token under Headstart's attention: {error}") from error
    missing = [i for i in range(num_layers) if i not in seen.layers]
    if missing:
        raise ModelError(
            f"{name} has {len(missing)} of {num_layers} layers without attention (layer {missing[0]} first): recurrent or "
            "convolutional state cannot be rolled back after a rejected draft. Choose a model with attention in each layer."
        )
    return [seen.layers[i] for i in range(num_layers)]
