"""`headstart export`: the same speculation in the words of another engine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.options import Json, Quiet, option
from headstart.errors import BadInput
from headstart.progress import note, set_quiet

if TYPE_CHECKING:
    from headstart.advise.export.wish import Exported

SERVER, SPECULATION = "Server", "Speculation"


def export(
    engine: Annotated[str, typer.Argument(help="vllm, llamacpp, tabbyapi, triton, sglang, trtllm or ollama.")],
    target: Annotated[
        str | None, option("--target", "-m", help="The model: a folder, a file, a hub id. [default: as --tuned says]")
    ] = None,
    draft: Annotated[str | None, option("--draft", help="The draft model.", panel=SPECULATION)] = None,
    head: Annotated[str | None, option("--head", help="The folder or hub id of a head.", panel=SPECULATION)] = None,
    method: Annotated[
        str | None, option("--method", help="ngram, suffix, mtp, or the kind of a head.", panel=SPECULATION)
    ] = None,
    tuned: Annotated[
        Path | None, option("--tuned", help="A file that headstart tune wrote.", panel=SPECULATION)
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, option("--num-speculative-tokens", "-k", help="How deep a draft may reach.", panel=SPECULATION)
    ] = None,
    tree: Annotated[
        bool, option("--tree", help="Drafts that branch, where the engine has them.", panel=SPECULATION)
    ] = False,
    tensor_parallel_size: Annotated[
        int | None, option("--tensor-parallel-size", help="Devices that share the target.", panel=SERVER)
    ] = None,
    draft_tensor_parallel_size: Annotated[
        int | None, option("--draft-tensor-parallel-size", help="Devices that share the draft.", panel=SERVER)
    ] = None,
    max_model_len: Annotated[
        int | None, option("--max-model-len", help="Longest prompt plus answer, in tokens.", panel=SERVER)
    ] = None,
    max_num_seqs: Annotated[
        int | None, option("--max-num-seqs", help="Requests that run together.", panel=SERVER)
    ] = None,
    dtype: Annotated[str | None, option("--dtype", help="auto, float32, bfloat16 or float16.", panel=SERVER)] = None,
    gpu_memory_utilization: Annotated[
        float | None, option("--gpu-memory-utilization", help="Share of a GPU's memory, 0 to 1.", panel=SERVER)
    ] = None,
    host: Annotated[str | None, option("--host", help="Address to listen on.", panel=SERVER)] = None,
    port: Annotated[int | None, option("--port", help="Port to listen on.", panel=SERVER)] = None,
    for_version: Annotated[
        str | None, option("--for-version", help="Of the engine, where its spelling has changed: 1.1 or 0.21.")
    ] = None,
    out: Annotated[
        Path | None, option("--out", "-o", help="Folder to write the files to. [default: standard output]")
    ] = None,
    force: Annotated[
        bool, option("--force", help="Export what would not run there, and write over files of others.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say it in another engine's words: the command or file that serves this target with this speculation there.

    What an engine has no word for is told on standard error and in a comment, and so is why each value is what it is. Models
    that are on this machine are checked first.

    Example: `headstart export vllm --target my-70b --draft my-1b --tensor-parallel-size 4`, or
    `headstart export triton --tuned tuned.json --out model-repository`
    """
    from headstart.advise.export import export as exporting
    from headstart.advise.export import keep
    from headstart.advise.export.order import Order
    from headstart.advise.export.wish import Serving

    set_quiet(quiet)
    sizes = {
        "--num-speculative-tokens": num_speculative_tokens, "--tensor-parallel-size": tensor_parallel_size,
        "--draft-tensor-parallel-size": draft_tensor_parallel_size, "--max-model-len": max_model_len,
        "--max-num-seqs": max_num_seqs,
    }  # fmt: skip
    _check(sizes, port, gpu_memory_utilization, dtype)
    serving = Serving(
        host, port, max_model_len, max_num_seqs, dtype, gpu_memory_utilization, tensor_parallel_size,
        draft_tensor_parallel_size,
    )  # fmt: skip
    order = Order(
        target, draft, head, method, tuned, num_speculative_tokens, tree, serving, _version(for_version),
        str(out) if out is not None else ".",
    )  # fmt: skip
    found = exporting(engine, order, force)
    written = keep.write(out, found.files, force) if out is not None else []
    if as_json:
        _print_json(engine, found)
        return
    for text in found.notes:
        note(f"Note: {text}")
    _print(found, written)


def _check(sizes: dict[str, int | None], port: int | None, share: float | None, dtype: str | None) -> None:
    from headstart.models.load import DTYPES

    for flag, value in sizes.items():
        if value is not None and not 1 <= value < 1 << 31:
            raise BadInput(f"{flag} {value} is not usable: expected a whole number from 1 on.")
    if port is not None and not 1 <= port <= 65535:
        raise BadInput(f"--port {port} is not usable: expected 1 to 65535.")
    if share is not None and not 0 < share <= 1:
        raise BadInput(f"--gpu-memory-utilization {share:g} is not usable: expected a share above 0, at most 1.")
    if dtype is not None and dtype not in ("auto", *DTYPES):
        raise BadInput(f"--dtype {dtype} is not usable: expected auto, {', '.join(DTYPES)}.")


def _version(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if re.fullmatch(r"v?\d{1,6}(\.\d{1,6})*", text, re.ASCII) is None:
        raise BadInput(f"--for-version {text} is not a version: write it like 1.2 or 0.21.0.")
    return tuple(int(part) for part in text.removeprefix("v").split("."))


# ------------------------------------------------------------------ what is told
def _print_json(engine: str, found: Exported) -> None:
    from headstart.cli.show import print_json

    files = [{"name": name, "text": text} for name, text in found.files]
    print_json({"engine": engine, "files": files, "command": list(found.command), "notes": list(found.notes)})


def _print(found: Exported, written: list[Path]) -> None:
    """The files, or where they lie and how to start. A single file can go through a pipe as it is."""
    if written:
        for path in written:
            note(f"Wrote {path}")
        print(shlex.join(found.command))
        return
    for name, text in found.files:
        if len(found.files) > 1:
            print(f"# ===== {name}")
        print(text, end="")
