"""Two vocabularies: are they one, how much do they share, and how does text pass from one to the other?

Tokens are compared by the bytes that they stand for, so a byte-level "Ġthe" and a sentencepiece "▁the" are the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SAME, TOKEN, STRING = "same", "token", "string"
TOKEN_OVERLAP = 0.5  # from this share of the target's vocabulary on, single tokens are mapped


def byte_decoder() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    others = (b for b in range(256) if b not in set(plain))
    return table | {chr(256 + i): b for i, b in enumerate(others)}


def token_bytes(pieces: dict[int, str], special: frozenset[int]) -> dict[int, bytes]:
    """Token id -> the bytes of its text; special tokens are left out."""
    byte_level = sum("Ġ" in p for p in pieces.values()) > sum("▁" in p for p in pieces.values())
    table = byte_decoder()
    out = {}
    for i, piece in pieces.items():
        if i in special:
            continue
        if byte_level:
            if all(c in table for c in piece):
                out[i] = bytes(table[c] for c in piece)
        elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            out[i] = bytes([int(piece[3:5], 16)])
        else:
            out[i] = piece.replace("▁", " ").encode()
    return out


@dataclass
class VocabMap:
    """From the draft's tokens to the target's, and the target's text to the draft's tokens."""

    kind: str
    overlap: float  # share of the target's tokens that the draft has too
    target_size: int
    to_draft: dict[int, int] = field(default_factory=dict)
    target_ids: torch.Tensor | None = None  # (M,) shared tokens in the target's vocabulary ...
    draft_ids: torch.Tensor | None = None  # (M,) ... and in the draft's

    def lift(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits (R, V_draft) over the target's vocabulary (R, V_target); what is not shared is impossible."""
        if self.kind == SAME:
            width = logits.shape[1]
            if width >= self.target_size:
                return logits[:, : self.target_size]
            return torch.nn.functional.pad(logits, (0, self.target_size - width), value=-torch.inf)
        assert self.target_ids is not None and self.draft_ids is not None
        out = logits.new_full((len(logits), self.target_size), -torch.inf)
        out[:, self.target_ids.to(logits.device)] = logits[:, self.draft_ids.to(logits.device)]
        return out

    def describe(self) -> str:
        if self.kind == SAME:
            return "same vocabulary"
        how = "single tokens are mapped" if self.kind == TOKEN else "drafts pass through text"
        return f"another vocabulary, {self.overlap:.0%} of the target's tokens are shared: {how}"


def map_vocab(target: Any, draft: Any, target_size: int, draft_size: int, kind: str = "auto") -> VocabMap:
    """How a draft with tokenizer `draft` serves a target with tokenizer `target`."""
    target_pieces, draft_pieces = target.pieces(), draft.pieces()
    shared_ids = [i for i in target_pieces if i in draft_pieces]
    agree = sum(target_pieces[i] == draft_pieces[i] for i in shared_ids)
    if kind == "auto" and agree == len(shared_ids) and agree >= 0.98 * max(len(target_pieces), len(draft_pieces)):
        return VocabMap(SAME, agree / len(target_pieces), target_size)
    ours = token_bytes(target_pieces, target.special_ids)
    theirs = {b: i for i, b in token_bytes(draft_pieces, draft.special_ids).items()}
    to_draft = {i: theirs[b] for i, b in ours.items() if b in theirs and i < target_size and theirs[b] < draft_size}
    for t, d in zip(sorted(target.eos_ids), sorted(draft.eos_ids), strict=False):
        to_draft[t] = d
    overlap = len(to_draft) / max(len(target_pieces), 1)
    chosen = kind if kind != "auto" else (TOKEN if overlap >= TOKEN_OVERLAP else STRING)
    pairs = sorted(to_draft.items())
    return VocabMap(
        chosen,
        overlap,
        target_size,
        to_draft,
        torch.tensor([t for t, _ in pairs], dtype=torch.long),
        torch.tensor([d for _, d in pairs], dtype=torch.long),
    )


def align(target: Any, tail: Sequence[int], new_text: str) -> list[int]:
    """`new_text` in the target's tokens as they would follow `tail`."""
    old = target.decode(tail, skip_special=False)
    ids = target.encode(old + new_text, special=False)
    known = target.encode(old, special=False)
    if list(known) == list(tail) and ids[: len(tail)] == list(tail):
        return ids[len(tail) :]
    return target.encode(new_text, special=False)
