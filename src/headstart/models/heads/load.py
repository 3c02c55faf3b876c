"""Load a head of any known project, strictly: each tensor of the file has its place, and each place its tensor.

What does not fit the target is said before any weight is read. Of the files' tensors only these may be left out, or
are passed over: `embed_tokens` (then the target's), `lm_head` (then the target's, where the head has its whole
vocabulary or its config says `lm_head_of_target`; EAGLE-1 and MTP files never need one), `t2d` (made from d2t), copies
of tied weights (MLP speculator); `verifier_lm_head`, `verifier_norm` and `rotary_emb.inv_freq` are passed over, and so
is all that is not of the MTP layer in the target's own folder.
"""

from __future__ import annotations

from pathlib import Path

import torch

from headstart.errors import ModelError
from headstart.models import files
from headstart.models.heads import Head
from headstart.models.heads.dialects import UNUSED, Plan, Source, TargetFacts, make_plan, misshapen
from headstart.models.heads.eagle import LayeredHead, make_rotary, target_tokens
from headstart.models.heads.store import Store, open_store
from headstart.progress import note

__all__ = ["TargetFacts", "load_head"]

MAPS = ("d2t", "t2d")


def load_head(path: Path, target: TargetFacts, device: torch.device, dtype: torch.dtype) -> Head:
    """The head of a folder, ready to run beside this target."""
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has no config.json, so it is not the folder of a head: name the folder that holds one."
        )
    config = files.read_json(path / "config.json")
    store = open_store(path)
    source = Source(path, config, store.shapes, target)
    plan = make_plan(source)
    places = find_places(source, plan)
    say_other_target(plan.head.spec.target, target.name, path)
    tensors = read(store, plan, places, target, device, dtype)
    plan.head.load_state_dict(tensors, strict=True, assign=True)
    if isinstance(plan.head, LayeredHead):  # its angles are computed, not loaded
        plan.head.rotary = make_rotary(plan.head.config).to(device)
    return plan.head.requires_grad_(False).eval()


def find_places(source: Source, plan: Plan) -> dict[str, str]:
    """The file's name of each tensor of the head that the file has; what is missing must be shared, tied or made."""
    wanted = {n: tuple(t.shape) for n, t in plan.head.state_dict().items()}
    kind = plan.head.spec.kind
    places: dict[str, str] = {}
    for name in source.shapes:
        if UNUSED.fullmatch(name) or (own := plan.rename(name)) is None:
            continue
        if own not in wanted or own in places:
            raise source.fail(
                f"holds a tensor {name!r} that its config.json leaves no place for (read as {kind}): weights that are "
                "not used would change what the head says. Check that config and weights belong together."
            )
        places[own] = name
        if source.shapes[name] != wanted[own]:
            raise misshapen(source, name, wanted[own])
    made = ("t2d", "lm_head.weight") if plan.borrows_rows else ("t2d",)
    for own, shape in wanted.items():
        if own not in places and own not in plan.tied and own not in made:
            check_shared(source, plan, own, shape)
    return places


def check_shared(source: Source, plan: Plan, own: str, wanted: tuple[int, ...]) -> None:
    """A tensor that the file lacks: the target has to lend it."""
    if own not in plan.shared:
        raise source.fail(
            f"lacks the tensor {own!r} that its config.json asks for (read as {plan.head.spec.kind}); a head with "
            "random weights only costs time. Fetch the checkpoint again."
        )
    lent = plan.shared[own]
    if lent is None:
        raise source.fail(
            f"has no {own!r} of its own and would share that of {source.target.name}, which cannot be had here: "
            "run the target with torch (runner='torch')."
        )
    if tuple(lent.shape) != wanted:
        raise source.fail(
            f"would share {own!r} of the target, which has shape {list(lent.shape)} instead of {list(wanted)}."
        )


def read(
    store: Store, plan: Plan, places: dict[str, str], target: TargetFacts, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A state dict. Tied weights are one tensor under several names."""
    wanted = plan.head.state_dict()
    out = {own: store.weight(name, device, dtype) for own, name in places.items() if own not in MAPS}
    for own, lent in plan.shared.items():
        if own not in out and own in wanted and lent is not None:
            out[own] = lent.detach().to(device, dtype)
    for own, other in plan.tied.items():
        if own not in out:
            out[own] = out[other]
    for name in plan.zeros:
        if bool(store.read(name).any()):
            raise ModelError(
                f"{store.folder} reorders a whole vocabulary with {name!r}, which Headstart does not support."
            )
    if "d2t" in wanted:
        out.update({n: t.to(device) for n, t in vocabulary(store, places, len(wanted["t2d"])).items()})
    if plan.borrows_rows and target.lm_head is not None:
        out["lm_head.weight"] = _rows(target.lm_head.detach(), out.get("d2t")).to(device, dtype)
    return out


def _rows(matrix: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """The target's rows for the head's own vocabulary."""
    if offsets is None:
        return matrix
    return matrix[target_tokens(offsets).to(matrix.device)]


def vocabulary(store: Store, places: dict[str, str], size: int) -> dict[str, torch.Tensor]:
    """d2t as it is, an offset for each token of the head; t2d as it is, or made from it."""
    offsets = store.read(places["d2t"])
    if offsets.dtype not in (torch.int64, torch.int32):
        raise ModelError(f"{store.folder}: 'd2t' should hold whole numbers, and is of type {offsets.dtype}.")
    offsets = offsets.long()
    targets = target_tokens(offsets)
    if int(targets.min()) < 0 or int(targets.max()) >= size or len(targets.unique()) != len(targets):
        raise ModelError(
            f"{store.folder}: 'd2t' does not lead to {len(targets)} different tokens below {size}; it should hold "
            "offsets, so that token i of the head is token i + d2t[i] of the target."
        )
    reached = torch.zeros(size, dtype=torch.bool)
    reached[targets] = True
    if "t2d" not in places:
        return {"d2t": offsets, "t2d": reached}
    given = store.read(places["t2d"]).bool()
    if not torch.equal(given, reached):
        note(f"{store.folder}: 't2d' does not say the same as 'd2t'; only 'd2t' is used.")
    return {"d2t": offsets, "t2d": given}


def say_other_target(made_for: str | None, ours: str, path: Path) -> None:
    """A head may serve a relative of the target that it was trained for, with fewer tokens accepted."""
    if made_for and last_name(made_for) != last_name(ours):
        note(f"{path} was trained for {made_for}, not for {ours}. Its sizes fit; it may foresee fewer tokens.")


def last_name(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").split("/")[-1].lower()
