"""`headstart convert`: a head of any project as a folder that vLLM and speculators read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import Quiet, option
from headstart.progress import note, set_quiet, status


def convert(
    head: Annotated[
        str, typer.Argument(help="The head's folder, in any dialect; or `smollm2` for the one that comes along.")
    ],
    out: Annotated[str, option("--out", "-o", help="Folder to write.", show_default=False)],
    target: Annotated[
        str, option("--target", "-t", help="The model that it drafts for: name, folder or hub id.")
    ] = "smollm2",
    tokens: Annotated[int, option("--tokens", "-k", help="Tokens that vLLM drafts where nobody says.")] = 5,
    dtype: Annotated[str, option("--dtype", help="Of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    lean: Annotated[
        bool,
        option(
            "--lean", help="Leave out embeddings and output matrix, where they are the target's: for Headstart alone."
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write an EAGLE-3 head in vLLM's speculators format, whoever made it.

    Every tensor of the source is accounted for, embeddings and output matrix are written even where the source left them to
    its target (unless `--lean` leaves them out), and the result is read back before it is called done.

    Example: `headstart convert smollm2 --out smollm2-eagle3`
    """
    set_quiet(quiet)
    import torch

    from headstart.errors import ConfigError
    from headstart.models.builtin import head_of, hub_id
    from headstart.models.heads.eagle import Eagle3Head
    from headstart.models.heads.load import TargetFacts, load_head
    from headstart.models.heads.save import learned, save_eagle3
    from headstart.models.load import load

    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in kinds:
        raise ConfigError(f"--dtype {dtype} is not known: use {', '.join(kinds)}.")
    source, cpu = head_of(head, "eagle3") or Path(head).expanduser(), torch.device("cpu")
    model = load(target, "cpu", "float32", runner="torch")
    facts, kind = TargetFacts.of(hub_id(model.name), model.model), kinds[dtype]
    with status(f"Reading {source}"):
        found = load_head(source, facts, cpu, kind)
    if not isinstance(found, Eagle3Head) or found.spec.kind != "eagle3":
        raise ConfigError(
            f"{head} is a head of the kind {found.spec.kind!r}; only EAGLE-3 heads can be written so far."
        )
    if lean and (own := learned(found, facts)):
        raise ConfigError(f"{head} has its own {' and '.join(own)}, not the target's: leave out --lean.")
    folder = Path(out).expanduser()
    save_eagle3(found, folder, found.spec.target or facts.name, tokens, not lean, not lean)
    again = load_head(folder, facts, cpu, kind).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in found.state_dict().items())
    reads = "Headstart alone reads it" if lean else f"vLLM reads it: vllm serve {folder}"
    note(f"{folder} holds the head, as {reads}")
