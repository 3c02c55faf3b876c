"""P-EAGLE: an EAGLE-3 head that drafts all levels in one forward. Behind the last known token it reads blanks.

A blank has an embedding of its own, that of the mask token, and features of its own, which were learned: `mask_hidden`, as wide
as the target's. It stands at the next position and attends to the text and to the blanks before it; its state speaks of the
token behind it. So no level waits for the one before, and none knows which token that one drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headstart.models.heads import Blank, HeadSpec
from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head


class PEagleHead(Eagle3Head):
    """`shape` is that of `mask_hidden` in its file: the width, behind one or two ones."""

    def __init__(
        self, spec: HeadSpec, config: Any, flags: Eagle3Flags, mask_token: int, shape: tuple[int, ...]
    ) -> None:
        super().__init__(spec, config, flags)
        self.mask_token = mask_token
        self.mask_hidden = nn.Parameter(torch.zeros(shape))

    @property
    def blank(self) -> Blank:  # type: ignore[override]
        return Blank(self.mask_token, self.mask_hidden.view(1, -1))
