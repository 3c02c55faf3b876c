"""Two vocabularies under each engine's own rule: are they one, and if not, where do they part?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.advise.facts import Vocabulary

LLAMACPP_FROM, LLAMACPP_APART = 5, 128  # llama.cpp compares texts from this id on, and sizes may differ by so much
SHOWN = 3  # differences that are shown


@dataclass(frozen=True)
class Relation:
    """How a draft's vocabulary stands to the target's."""

    sizes: tuple[int, int]  # that the tokenizers know
    differing: int  # ids below both sizes that stand for different texts
    first: tuple[tuple[int, str, str], ...]  # some of them: id, the target's text, the draft's
    shared: float  # of the target's texts, those that the draft has too, at whichever id

    @property
    def same(self) -> bool:
        return not self.differing and self.sizes[0] == self.sizes[1]

    @property
    def prefix(self) -> bool:
        """One has some more at the end, and that is all."""
        return not self.differing and self.sizes[0] != self.sizes[1]

    def told(self) -> str:
        """In a sentence."""
        if self.same:
            return f"the vocabularies are the same ({self.sizes[0]:,} tokens)."
        if self.prefix:
            return f"the vocabularies are the same but for {abs(self.sizes[0] - self.sizes[1]):,} tokens at the end."
        shown = "; ".join(f"{number} is {ours!r} here and {theirs!r} there" for number, ours, theirs in self.first)
        both = f"{self.shared:.0%} of the target's texts are in both"
        return f"{self.differing:,} ids stand for different tokens ({shown}); {both}."


def relate(target: Vocabulary, draft: Vocabulary) -> Relation:
    pairs = enumerate(zip(target.texts, draft.texts, strict=False))
    apart = [(number, ours, theirs) for number, (ours, theirs) in pairs if ours != theirs]
    known = set(draft.texts)
    shared = sum(text in known for text in target.texts) / max(1, len(target.texts))
    return Relation((len(target), len(draft)), len(apart), tuple(apart[:SHOWN]), shared)


def llamacpp_objections(target: Vocabulary, draft: Vocabulary) -> list[str]:
    """What llama.cpp would refuse a draft model for, in its own order."""
    out = []
    if target.kind != draft.kind:
        out.append(f"tokenizers of different types ({target.kind} and {draft.kind})")
    out += _marks("BOS", target.adds_bos, draft.adds_bos, _one(target.bos), _one(draft.bos))
    out += _marks("EOS", target.adds_eos, draft.adds_eos, target.eos[:1], draft.eos[:1])
    if (apart := abs(len(target) - len(draft))) > LLAMACPP_APART:
        out.append(f"vocabularies that differ by {apart:,} tokens, where {LLAMACPP_APART} are allowed")
    for number in range(LLAMACPP_FROM, min(len(target), len(draft))):
        if target.texts[number] != draft.texts[number]:
            out.append(f"token {number} is {target.texts[number]!r} in one and {draft.texts[number]!r} in the other")
            break
    return out


def _marks(name: str, ours: bool, theirs: bool, mine: Sequence[int], other: Sequence[int]) -> list[str]:
    if ours != theirs:
        return [f"one adds {name} to prompts and the other does not"]
    return [f"different {name} tokens"] if ours and tuple(mine) != tuple(other) else []


def _one(number: int | None) -> tuple[int, ...]:
    return () if number is None else (number,)
