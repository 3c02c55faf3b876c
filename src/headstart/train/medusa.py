"""Medusa: a small network of its own for each token of a draft, all on the target's last state (arXiv 2401.10774).

Level k foresees the token k + 2 places behind that state's; the next one comes from the target's own output matrix. A level
is residual blocks and an output matrix. It begins as the target's own: blocks that add nothing, a copy of its matrix. No level
knows which tokens stand in between, so each learns what the target says on average over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.errors import ConfigError, nearest
from headstart.models.heads import HeadSpec
from headstart.models.heads.dialects import TargetFacts
from headstart.models.heads.medusa import MedusaHead
from headstart.models.heads.save import MEDUSA_DIALECTS, save_medusa
from headstart.models.load import Loaded
from headstart.train.options import HeadOptions
from headstart.train.packing import Document
from headstart.train.student import HeadStudent, place


@dataclass(frozen=True)
class MedusaOptions(HeadOptions):
    kind = "medusa"
    least = HeadOptions.least | {"blocks": 1}

    blocks: int = 1  # residual blocks of a level
    learn_output: bool = True  # the output matrices; otherwise they stay the target's
    dialect: str = "vllm"  # of what is written

    def check(self) -> None:
        super().check()
        if self.dialect not in MEDUSA_DIALECTS:
            raise ConfigError(f"dialect={self.dialect!r} is not known.{nearest(self.dialect, MEDUSA_DIALECTS)}")

    def begin(self, target: Loaded, docs: Sequence[Document]) -> MedusaStudent:
        model = target.model
        facts = TargetFacts.of(self.target_name(target), model)
        spec = HeadSpec(
            "medusa",
            facts.hidden_size,
            facts.vocab_size,
            facts.vocab_size,
            (facts.num_layers,),
            self.levels,
            facts.name,
        )
        head = MedusaHead(spec, self.blocks)
        with torch.no_grad():
            for name, p in head.named_parameters():
                if ".linear." in name:
                    p.zero_()
                else:
                    p.copy_(model.get_output_embeddings().weight).requires_grad_(self.learn_output)
        place(head, model.device, model.dtype)
        return MedusaStudent(head, self)


class MedusaStudent(HeadStudent):
    title, method = "Medusa heads", "medusa"
    recompute = True
    module: MedusaHead

    def __init__(self, head: MedusaHead, options: MedusaOptions) -> None:
        super().__init__(head, options.levels, options.decay, options.noise)
        self.dialect = options.dialect
        self.format = MEDUSA_DIALECTS[options.dialect]

    def activations(self, batch: int, length: int) -> int:
        head, size = self.module, next(self.module.parameters()).element_size()
        return batch * length * size * head.spec.hidden_size * self.levels * (1 + 3 * head.blocks)

    def save(self, folder: Path, target_name: str) -> None:
        save_medusa(self.module, folder, target_name, self.dialect)
