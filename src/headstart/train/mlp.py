"""IBM's MLP speculator: a recurrent network behind the target's last state (arXiv 2404.19124).

At each level the state takes in a token: while it learns the text's, while it drafts its own of the level before. So, unlike
Medusa's, a level knows what stands between it and the target's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.errors import ConfigError
from headstart.models.heads import HeadSpec
from headstart.models.heads.dialects import TargetFacts
from headstart.models.heads.mlp import MlpHead
from headstart.models.heads.save import save_mlp
from headstart.models.load import Loaded
from headstart.train.options import HeadOptions
from headstart.train.packing import Document
from headstart.train.student import HeadStudent, place


@dataclass(frozen=True)
class MlpOptions(HeadOptions):
    kind = "mlp"
    least = HeadOptions.least | {"inner": 1}

    levels: int = 4
    decay: float = 1.0
    inner: int | None = None  # width of the state; None: the target's
    tie: bool = True  # all levels share their weights
    scale_input: bool = True  # the target's state is brought to one size first

    def check(self) -> None:
        super().check()
        if self.tie and self.levels < 2:
            raise ConfigError("One level alone has no weights to share: give more levels, or tie=False (--no-tie).")

    def begin(self, target: Loaded, docs: Sequence[Document]) -> MlpStudent:
        model = target.model
        facts = TargetFacts.of(self.target_name(target), model)
        inner = self.inner or facts.hidden_size
        spec = HeadSpec(
            "mlp", facts.hidden_size, facts.vocab_size, facts.vocab_size, (facts.num_layers,), self.levels, facts.name
        )
        head = MlpHead(spec, inner, self.scale_input)
        if self.tie:
            head.tie()
        for module in head.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=inner**-0.5)
        place(head, model.device, model.dtype)
        return MlpStudent(head, self.levels, self.decay, self.noise)


class MlpStudent(HeadStudent):
    title, method, format = "MLP speculator", "mlp_speculator", "IBM's, which vLLM reads"
    recompute = True
    module: MlpHead

    def activations(self, batch: int, length: int) -> int:
        head, size = self.module, next(self.module.parameters()).element_size()
        return batch * length * size * (2 * head.spec.hidden_size + 8 * self.levels * head.inner)

    def save(self, folder: Path, target_name: str) -> None:
        save_mlp(self.module, folder)
