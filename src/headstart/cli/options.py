"""The options that verbs share: the model, speculation, sampling. Each group turns itself into what the API takes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.config import AUTO, SpeculativeConfig, parse_speculative
from headstart.errors import BadInput, ConfigError
from headstart.progress import note

if TYPE_CHECKING:
    from headstart.llm import LLM

MODEL, SPECULATION, SAMPLING = "Model", "Speculation", "Sampling"


def option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


MaxTokens = Annotated[int, option("--max-tokens", help="Stop after so many new tokens.", panel=SAMPLING)]
Temperature = Annotated[
    float, option("--temperature", "-t", help="0 is greedy; 1 samples as the model says.", panel=SAMPLING)
]
Json = Annotated[bool, option("--json", help="One JSON object on standard output, and nothing else.")]
Quiet = Annotated[bool, option("--quiet", "-q", help="No progress, notes or summary on standard error.")]


# ------------------------------------------------------------------ the model and the engine
@dataclass(frozen=True)
class EngineOptions:
    model: Annotated[
        str,
        option(
            "--model", "-m", help="Built-in name, folder, GGUF file, ollama:NAME or hub id (owner/name).", panel=MODEL
        ),
    ] = "smollm2"
    device: Annotated[str, option("--device", help="auto, cpu, cuda or cuda:0.", panel=MODEL)] = "auto"
    dtype: Annotated[str, option("--dtype", help="auto, float32, bfloat16 or float16.", panel=MODEL)] = "auto"
    max_model_len: Annotated[
        int | None, option("--max-model-len", help="Longest prompt plus answer, in tokens.", panel=MODEL)
    ] = None
    kv_memory: Annotated[
        str | None,
        option(
            "--kv-memory", help="Memory for the KV pool: 2GB, 512MiB or bytes. [default: from free memory]", panel=MODEL
        ),
    ] = None
    threads: Annotated[int | None, option("--threads", help="CPU threads to compute with.", panel=MODEL)] = None
    quantize: Annotated[
        str | None,
        option("--quantize", help="int8 or int4: smaller weights for the Llama family on a CPU.", panel=MODEL),
    ] = None
    runner: Annotated[
        str,
        option(
            "--runner",
            help="Who computes a GGUF file: torch, llamacpp, or auto: llama.cpp on CPUs where it is installed.",
            panel=MODEL,
        ),
    ] = "auto"
    gpu_layers: Annotated[
        int, option("--gpu-layers", help="llama.cpp: layers on the GPU; -1 is all of them.", panel=MODEL)
    ] = -1
    kv_type: Annotated[
        str, option("--kv-type", help="llama.cpp: how keys and values are kept: f32, f16, q8_0, q4_0, ...", panel=MODEL)
    ] = "f16"
    flash_attention: Annotated[
        bool | None,
        option(
            "--flash-attention/--no-flash-attention",
            help="llama.cpp: flash attention. [default: where it helps]",
            panel=MODEL,
            show_default=False,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, option("--trust-remote-code", help="Run Python code that comes with the model.", panel=MODEL)
    ] = False
    no_fuse: Annotated[
        bool, option("--no-fuse", help="Run the model's own code instead of the lean forward.", panel=MODEL)
    ] = False
    no_kernels: Annotated[
        bool,
        option("--no-kernels", help="On a GPU, take the reference path: no Triton kernels, no graphs.", panel=MODEL),
    ] = False
    deterministic: Annotated[
        bool,
        option(
            "--deterministic",
            help="On a GPU, the same bits for a token whoever shares its forward: with speculation or without, alone or in "
            "any batch.",
            panel=MODEL,
        ),
    ] = False
    record: Annotated[
        str | None,
        option(
            "--record",
            help="Write a trace for headstart simulate to this file: token ids and what became of drafts, no text.",
            panel=MODEL,
            show_default=False,
        ),
    ] = None

    def open(self, speculative: SpeculativeConfig, profile: bool = False, **more: Any) -> LLM:
        """Load the model with its drafter; `more` is for the LLM."""
        memory = None if self.kv_memory is None else parse_bytes(self.kv_memory)
        self.set_threads()
        from headstart.llm import LLM

        return LLM(
            self.model,
            speculative=speculative,
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            kv_memory=memory,
            fuse=not self.no_fuse,
            kernels=not self.no_kernels,
            deterministic=self.deterministic,
            quantize=self.quantize,
            runner=self.runner,
            gpu_layers=self.gpu_layers,
            kv_type=self.kv_type,
            flash_attention=self.flash_attention,
            threads=self.threads,
            record=self.record,
            profile=profile,
            trust_remote_code=self.trust_remote_code,
            **more,
        )

    def set_threads(self) -> None:
        if self.threads is None:
            return
        if self.threads < 1:
            raise BadInput(f"--threads {self.threads} is not usable: expected a whole number of at least 1.")
        import torch

        torch.set_num_threads(self.threads)


def read_file(flag: str, path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} cannot be read: it is not text.") from error


UNITS = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for kind, base in (("", 1024), ("B", 1000), ("IB", 1024))
}


def parse_bytes(text: str, flag: str = "--kv-memory") -> int:
    """'2GB', '512MiB', '1.5g' or '1000000' -> bytes. A bare letter counts by 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS:
        raise BadInput(f"{flag} {text!r} is not an amount of memory: write it like 2GB, 512MiB or 1000000.")
    return int(float(match[1]) * UNITS[match[2].upper()])


# ------------------------------------------------------------------ speculation
@dataclass(frozen=True)
class SpeculationOptions:
    drafter: Annotated[
        str | None,
        option(
            "--drafter",
            "-d",
            help="auto: whatever pays, of all that is at hand. Or none, ngram, suffix, draft_model, early_exit; a head: "
            "eagle3, peagle, eagle, medusa, mlp_speculator, mtp; or a class of yours by dotted path. [default: auto]",
            panel=SPECULATION,
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        option(
            "--draft-model",
            help="What drafts: a model's name, folder, GGUF file or hub id, or a head's folder.",
            panel=SPECULATION,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        option("--num-speculative-tokens", "-k", help="How deep a draft may reach. [default: 5]", panel=SPECULATION),
    ] = None
    tree: Annotated[
        bool,
        option("--tree", help="Let the draft model or head branch instead of drafting one chain.", panel=SPECULATION),
    ] = False
    static_tree: Annotated[
        str | None,
        option(
            "--static-tree",
            help="File with the shape of every draft of a draft model or head, as `headstart tree` writes it.",
            panel=SPECULATION,
        ),
    ] = None
    verification: Annotated[
        str | None,
        option(
            "--verification",
            help="walk: same seed, same text as without speculation. rejection: same distribution. [default: walk]",
            panel=SPECULATION,
        ),
    ] = None
    policy: Annotated[
        str | None,
        option(
            "--policy",
            help="fixed: always as many draft tokens as -k says. adaptive: as many as pay here. [default: adaptive with auto, "
            "else fixed]",
            panel=SPECULATION,
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        option(
            "--speculative-config", help="vLLM's JSON object as it is, instead of the options above.", panel=SPECULATION
        ),
    ] = None
    tuned: Annotated[
        str | None,
        option(
            "--tuned", help="What headstart tune wrote, instead of all these.", panel=SPECULATION, show_default=False
        ),
    ] = None

    def config(self, default: str = AUTO, preset: Mapping[str, Any] | None = None) -> SpeculativeConfig:
        """The speculative config that these options name, or else the preset; what must be said about it is said."""
        given, whole = self.shorthands(), self.whole()
        if whole is not None:
            config, notes = parse_speculative(whole)
        else:
            named = {"drafter", "draft_model", "static_tree"} & given.keys()
            base = {} if named or not preset else dict(preset)
            config, notes = parse_speculative(base | complete(given, default))
        for text in notes:
            note(text)
        if "." in config.method and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a drafter in the folder that the user stands in
        return config

    def whole(self) -> str | dict[str, Any] | None:
        """What says everything: a file of `tune`, or JSON. None: the shorthands do."""
        given = list(self.shorthands())
        if self.tuned is not None:
            from headstart.advise.decision import read

            if also := [*given, *(["speculative_config"] if self.speculative_config is not None else [])]:
                raise ConfigError(f"--tuned says everything: leave out {flags_of(also)}.")
            return dict(read(Path(self.tuned)).speculative) or {"method": "none"}
        if self.speculative_config is not None and given:
            raise ConfigError(
                f"--speculative-config says everything: leave out {flags_of(given)} or put it into the JSON."
            )
        return self.speculative_config

    def shorthands(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("speculative_config", "tuned")}
        return {name: value for name, value in values.items() if value not in (None, False)}


def complete(given: dict[str, Any], default: str) -> dict[str, Any]:
    """Shorthands in the config's own names. One that could have no effect is an error."""
    out = dict(given)
    method = out.pop("drafter", "draft_model" if "draft_model" in out else default)
    if method == "none" and out:
        raise ConfigError(
            f"{flags_of(out)} has no effect without a drafter: add --drafter ngram, suffix or draft_model."
        )
    if "draft_model" in out and method in ("ngram", "suffix", "early_exit"):
        raise ConfigError(f"--draft-model has no effect with --drafter {method}: leave one of the two out.")
    if method == "draft_model" and "draft_model" not in out:
        raise ConfigError("--drafter draft_model needs the model that drafts: add --draft-model NAME.")
    if method in ("ngram", "suffix") and (trees := [n for n in ("tree", "static_tree") if n in out]):
        why = "drafts chains" if method == "ngram" else "grows trees of its own"
        raise ConfigError(f"{flags_of(trees)} has no effect with --drafter {method}, which {why}: leave it out.")
    if "draft_model" in out:
        out["model"] = out.pop("draft_model")
    return {"method": method} | out


def engine_words(text: str) -> tuple[str, ...]:
    """Of --engine-args, as a shell would take them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadInput(f"--engine-args {text} cannot be read: {error}.") from error


def flags_of(names: Sequence[str] | dict[str, Any]) -> str:
    """As people type them."""
    return ", ".join("--" + name.replace("_", "-") for name in names)
