"""What projects that make heads write, and how to read it: from config and tensor names to a head without weights.

A key that a config leaves out has the meaning that the project which writes the dialect gives it; engines that serve
such files sometimes differ, and where they do it is said here. Nothing in this file reads a weight.

speculators (`speculators_model_type`: eagle3 or peagle). `norm_before_residual`, `norm_before_fc`, `fc_norm` and `norm_output`
are false when left out, as in speculators' own config class (vLLM takes a missing norm_before_residual as true;
speculators always writes it). `eagle_aux_hidden_state_layer_ids` count layers as `HeadSpec.taps` does; null means [2,
L//2, L-3]. (Id L is the stream after the final norm here, as transformers counts, and before it in vLLM; only
Headstart's own heads for very small targets use it.) A transformer_layer_config without a model_type is qwen3, and what
it leaves out has transformers' default.

EAGLE-3 flat (the original, SpecForge, AngelSlim, ModelOpt: a Llama config, and `midlayer.*` for layer 0). All norm
flags are false when left out. A norm_output that is true is read as vLLM reads it, though SpecForge trains as if it
were false. Layer ids inside `eagle_config` count from the output of layer 0, since SpecForge, SGLang and ModelOpt mean
it so: id k is tap k + 1 (vLLM reads them as k). Ids at the top level are vLLM's, and are taps. None at all: [2, L//2,
L-3], the same layers for everyone.

P-EAGLE is EAGLE-3 of either kind with `mask_hidden`, [1, 1, taps · hidden] from speculators and SpecForge, [1, taps ·
hidden] from others, and the number of its mask token: `mask_token_id`, `pard_token` or `ptd_token_id` (AWS), the first
that is there, as in vLLM. All flags count, as they do in speculators' training (vLLM passes over fc_norm here, and
norm_output changes nothing where no level reads another's state).

EAGLE-1 and 2 (the original): Llama layers; `bias` is that of fc, and where it is left out the file tells; `qkv_bias` is
that of Qwen2. Medusa: as many levels as the file has, since the original configs say 2 where there are 5. MLP
speculator: as in vLLM. MTP: one layer that attends as Llama or Qwen do; the config is the target's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headstart.errors import ModelError
from headstart.models.heads import Head, HeadSpec
from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head
from headstart.models.heads.eagle1 import Eagle1Head, MtpHead
from headstart.models.heads.medusa import MedusaHead
from headstart.models.heads.mlp import MlpHead
from headstart.models.heads.peagle import PEagleHead
from headstart.progress import note

LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling",
    "attention_bias", "mlp_bias", "vocab_size", "layer_types", "use_sliding_window",
)  # fmt: skip
BORROWS = "lm_head_of_target"  # our own: in the config of a head that did not learn an output matrix
UNUSED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|verifier_(lm_head|norm)\.weight")  # computed; for training only
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
ENORM = re.compile(r"model\.layers\.(\d+)\.enorm\.weight")


@dataclass(frozen=True)
class TargetFacts:
    """What a head has to fit. The tensors are for heads that share them; None where they cannot be had."""

    name: str
    hidden_size: int
    vocab_size: int  # rows of the lm_head
    num_layers: int
    embedding: torch.Tensor | None = None  # (vocabulary, hidden)
    lm_head: torch.Tensor | None = None  # (vocabulary, hidden)

    @staticmethod
    def of(name: str, model: Any) -> TargetFacts:
        """Of a transformers model in memory."""
        config, output = model.config.get_text_config(), model.get_output_embeddings().weight
        embedding = model.get_input_embeddings().weight
        return TargetFacts(name, config.hidden_size, len(output), config.num_hidden_layers, embedding, output)


@dataclass
class Plan:
    """A head on the meta device, and where each of its tensors comes from."""

    head: Head
    rename: Callable[[str], str | None] = lambda name: name  # of the file -> of the head; None: not for us
    shared: dict[str, torch.Tensor | None] = field(default_factory=dict)  # the target's, where the file has none
    tied: dict[str, str] = field(default_factory=dict)  # another of the head's, where the file has none
    zeros: tuple[str, ...] = ()  # of the file; not for us as long as they are zero
    borrows_rows: bool = False  # the lm_head is made of the target's rows of its vocabulary; the file has none


@dataclass(frozen=True)
class Source:
    """A folder as far as it was read."""

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    target: TargetFacts

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.folder} {what}")

    def check_size(self, what: str, own: Any, wanted: int) -> None:
        if own != wanted:
            raise self.fail(
                f"was made for a target with a {what} of {own}, and {self.target.name} has {wanted}: "
                f"choose a head that was trained for {self.target.name}."
            )


def make_plan(source: Source) -> Plan:
    """Find the dialect; check the sizes against the target's; make the head."""
    if source.config.get("quantization_config"):
        raise source.fail("is quantised, and Headstart runs heads in float32, bfloat16 or float16 only.")
    with torch.device("meta"):
        return find_dialect(source)(source)


def find_dialect(source: Source) -> Callable[[Source], Plan]:
    config, names = source.config, source.shapes
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3", "peagle"):
        raise source.fail(
            f"is a speculator of type {kind!r}, which Headstart does not run; of these it runs eagle3 and peagle."
        )
    if kind is not None:
        return speculators
    if config.get("model_type") == "mlp_speculator":
        return mlp_speculator
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return medusa
    if any(ENORM.fullmatch(n) for n in names):
        return mtp
    if any(n.startswith("midlayer.") for n in names) or "layers.0.hidden_norm.weight" in names:
        return flat_eagle3
    if _says_eagle3(config):
        return flat_eagle3
    if "fc.weight" in names and any(n.startswith("layers.0.") for n in names):
        return eagle1
    raise unknown(source)


def _says_eagle3(config: dict[str, Any]) -> bool:
    return "draft_vocab_size" in config or any(n in str(config.get("architectures")) for n in ("Eagle3", "PEagle"))


def unknown(source: Source) -> ModelError:
    if any(n.startswith(("mtp.", "model.mtp_layers.")) for n in source.shapes):
        return source.fail(
            "has MTP layers in Qwen's or MiMo's naming, which Headstart does not read; DeepSeek's it does."
        )
    first = ", ".join(repr(n) for n in sorted(source.shapes)[:3]) or "none at all"
    return source.fail(
        "is no head that Headstart knows: EAGLE-1, 2 or 3, P-EAGLE, Medusa, MLP speculator or MTP "
        f"(first tensors: {first}). Name the folder of the head, not that of the target."
    )


# ------------------------------------------------------------------ EAGLE-3
def speculators(source: Source) -> Plan:
    config, inner = source.config, table(source, source.config, "transformer_layer_config")
    parallel = config["speculators_model_type"] == "peagle"
    if "norm_before_residual" not in config and not parallel:
        note(f"{source.folder} does not say norm_before_residual: taken as false. (vLLM would take it as true.)")
    about = table(source, table(source, config, "speculators_config"), "verifier")
    layers = layer_config(source, inner, str(inner.get("model_type", "qwen3")), ("llama", "qwen3"))
    taps = aux_taps(source, config.get("eagle_aux_hidden_state_layer_ids"), 0)
    return eagle3(source, layers, config, taps, about.get("name_or_path"), "speculators", parallel)


def flat_eagle3(source: Source) -> Plan:
    config = source.config
    nested = table(source, config, "eagle_config")
    if not nested.get("use_aux_hidden_state", True):
        raise source.fail(
            "reads one hidden state only (use_aux_hidden_state is false), which Headstart does not support."
        )
    kind = str(config.get("model_type", "llama"))
    layers = layer_config(source, config, "llama" if kind == "mistral" else kind, ("llama", "qwen3"))
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    taps = aux_taps(source, inner, 1) if inner and not ids else aux_taps(source, ids, 0)
    parallel = "mask_hidden" in source.shapes or "PEagle" in str(config.get("architectures"))
    made_for = config.get("target_model_name_or_path")
    return eagle3(source, layers, {**config, **nested}, taps, made_for, "eagle3", parallel)


def eagle3(
    source: Source,
    layers: Any,
    config: dict[str, Any],
    taps: tuple[int, ...],
    made_for: Any,
    dialect: str,
    parallel: bool,
) -> Plan:
    target = source.target
    source.check_size("hidden size", config.get("target_hidden_size") or layers.hidden_size, target.hidden_size)
    source.check_size("vocabulary", layers.vocab_size, target.vocab_size)
    draft = config.get("draft_vocab_size") or config.get("truncated_vocab_size") or layers.vocab_size
    if not isinstance(draft, int) or not 0 < draft <= target.vocab_size:
        raise source.fail(f"has a draft_vocab_size of {draft!r}, and the target has {target.vocab_size} tokens.")
    spec = _spec(source, "peagle" if parallel else "eagle3", dialect, made_for, taps=taps, draft_vocab_size=draft)
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    flags = Eagle3Flags(**{n: bool(config.get(n, False)) for n in names})
    head = peagle(source, spec, layers, flags) if parallel else Eagle3Head(spec, layers, flags)
    full, borrows = draft == target.vocab_size, bool(config.get(BORROWS, False))
    if borrows and (layers.hidden_size != target.hidden_size or target.lm_head is None):
        raise source.fail(
            "borrows the target's lm_head, which cannot be had here: run the target with torch (runner='torch')."
        )
    shared: dict[str, torch.Tensor | None] = {}
    if layers.hidden_size == target.hidden_size:
        shared = {"embed_tokens.weight": target.embedding, **({"lm_head.weight": target.lm_head} if full else {})}
    mapping = ("d2t", "t2d") if full else ()  # SpecForge writes them even where they say nothing
    for name in mapping:
        if source.shapes.get(name, (target.vocab_size,)) != (target.vocab_size,):
            raise misshapen(source, name, (target.vocab_size,))
    return Plan(
        head,
        lambda name: None if name in mapping else re.sub(r"^midlayer\.", "layers.0.", name),
        shared,
        zeros=tuple(n for n in mapping[:1] if n in source.shapes),
        borrows_rows=borrows,
    )


def peagle(source: Source, spec: HeadSpec, layers: Any, flags: Eagle3Flags) -> PEagleHead:
    said = next((n for n in MASK_TOKENS if source.config.get(n) is not None), None)
    if said is None:
        raise source.fail(
            f"is a P-EAGLE head without the number of its mask token: its config.json should have {MASK_TOKENS[0]}."
        )
    token, width = source.config[said], len(spec.taps) * spec.hidden_size
    if not isinstance(token, int) or not 0 <= token < spec.vocab_size:
        raise source.fail(f"has a {said} of {token!r} in its config.json, and {spec.vocab_size} tokens.")
    leading = len(source.shapes.get("mask_hidden", ())) - 1
    return PEagleHead(spec, layers, flags, token, (*(1,) * min(max(leading, 1), 2), width))


def aux_taps(source: Source, ids: Any, shift: int) -> tuple[int, ...]:
    """Taps that layer ids stand for."""
    count = source.target.num_layers
    if not ids:
        ids, shift = [2, count // 2, count - 3], 0
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise source.fail(f"has eagle_aux_hidden_state_layer_ids that are no list of numbers: {ids!r}.")
    taps = tuple(i + shift for i in ids)
    if not all(0 <= t <= count for t in taps):
        raise source.fail(
            f"reads the target behind layers {list(taps)}, and {source.target.name} has {count} layers: "
            f"choose a head that was trained for {source.target.name}."
        )
    return taps


# ------------------------------------------------------------------ EAGLE-1 and MTP
def eagle1(source: Source) -> Plan:
    config, target = source.config, source.target
    layers = layer_config(source, config, "qwen2" if config.get("qkv_bias") else "llama", ("llama", "qwen2"))
    source.check_size("hidden size", layers.hidden_size, target.hidden_size)
    source.check_size("vocabulary", layers.vocab_size, target.vocab_size)
    spec = _spec(source, "eagle", "eagle", config.get("target_model_name_or_path"))
    head = Eagle1Head(spec, layers, bool(config.get("bias", "fc.bias" in source.shapes)))
    return Plan(head, shared={"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head})


def mtp(source: Source) -> Plan:
    config, target = source.config, source.target
    found = sorted(int(m[1]) for n in source.shapes if (m := ENORM.fullmatch(n)))
    if len(found) > 1:
        raise source.fail(f"has {len(found)} MTP layers; Headstart runs heads with one.")
    prefix = f"model.layers.{found[0]}."
    own = [n.removeprefix(prefix) for n in source.shapes if n.startswith(prefix)]
    refuse_layer(source, own)
    kind = str(config.get("model_type", "llama"))
    layers = layer_config(
        source, {**config, "num_hidden_layers": 1, "layer_types": None}, kind, ("llama", "qwen2", "qwen3")
    )
    source.check_size("hidden size", layers.hidden_size, target.hidden_size)
    source.check_size("vocabulary", layers.vocab_size, target.vocab_size)
    source.check_size("number of layers", found[0], target.num_layers)
    embedding = f"{prefix}embed_tokens.weight"
    if embedding not in source.shapes and target.embedding is None:  # the target's own folder has it
        embedding = "model.embed_tokens.weight"

    def rename(name: str) -> str | None:
        if name == embedding:
            return "embed_tokens.weight"
        return _mtp_name(name.removeprefix(prefix)) if name.startswith(prefix) else None

    head = MtpHead(_spec(source, "mtp", "mtp", None), layers)
    return Plan(head, rename, {"embed_tokens.weight": target.embedding, "shared_head.head.weight": target.lm_head})


def refuse_layer(source: Source, names: Iterable[str]) -> None:
    """Kinds of layers that an MTP head may have and ours do not."""
    for part, what in (
        ("self_attn.kv_a_proj", "latent attention (MLA)"),
        ("self_attn.q_a_proj", "latent attention (MLA)"),
        ("mlp.experts", "a mixture of experts (MoE)"),
        ("mlp.gate.", "a mixture of experts (MoE)"),
        ("linear_attn.", "linear attention"),
    ):
        if name := next((n for n in names if n.startswith(part)), None):
            raise source.fail(
                f"has an MTP layer with {what} (tensor {name!r}), which Headstart does not support in heads."
            )


def _mtp_name(name: str) -> str:
    """The decoder layer stands beside the norms and the projection in the file, and under `layers.0` in the head."""
    inside = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    return f"layers.0.{name}" if name.startswith(inside) else name


# ------------------------------------------------------------------ Medusa and MLP
def medusa(source: Source) -> Plan:
    """Names of Medusa (`0.0.linear.weight`, `0.1.weight`) or vLLM (`blocks.0.layers.0.weight`, `lm_heads.0.weight`)."""
    config, target = source.config, source.target
    blocks = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    if not isinstance(blocks, int) or blocks < 1:
        raise source.fail(f"has a medusa_num_layers of {blocks!r} in its config.json; it should be 1 or more.")
    names = {n: medusa_name(n, blocks) for n in source.shapes}
    levels = len({own.split(".")[1] for own in names.values() if re.match(r"heads\.\d+\.", own)})
    if not levels:
        raise unknown(source)
    said = config.get("medusa_num_heads", config.get("num_heads"))
    levels = max(levels, said) if isinstance(said, int) else levels  # fewer in the file: the missing ones are named
    for name, own in names.items():
        if re.fullmatch(rf"heads\.\d+\.{blocks}\.weight", own) and len(source.shapes[name]) == 2:
            source.check_size("hidden size", source.shapes[name][1], target.hidden_size)
            source.check_size("vocabulary", source.shapes[name][0], target.vocab_size)
    made_for = config.get("base_model_name_or_path")
    spec = _spec(source, "medusa", "medusa", made_for, max_depth=levels)
    bias = any(n.endswith(".bias") for n in source.shapes)
    return Plan(MedusaHead(spec, blocks, bias), names.__getitem__)


def medusa_name(name: str, blocks: int) -> str:
    bare = re.sub(r"^medusa_heads?\.", "", name)
    bare = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", bare)
    bare = re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{blocks}.", bare)
    return f"heads.{bare}" if bare[:1].isdigit() else bare


def mlp_speculator(source: Source) -> Plan:
    config, target = source.config, source.target
    width, depth = config.get("emb_dim", 4096), config.get("n_predict", 3)
    inner = config.get("inner_dim", 0) or width
    if not all(isinstance(n, int) and n > 0 for n in (width, depth, inner)):
        raise source.fail("has sizes in its config.json (emb_dim, inner_dim, n_predict) that are no positive numbers.")
    source.check_size("hidden size", width, target.hidden_size)
    source.check_size("vocabulary", config.get("vocab_size", 32000), target.vocab_size)
    spec = _spec(source, "mlp", "mlp_speculator", None, max_depth=depth)
    tied: dict[str, str] = {}
    if config.get("tie_weights", False):
        for i in range(1, depth):
            tied.update({f"{n}.{i}.weight": f"{n}.0.weight" for n in ("emb", "head", "ln")})
            tied[f"ln.{i}.bias"] = "ln.0.bias"
        tied.update({f"proj.{i}.weight": "proj.1.weight" for i in range(2, depth)})
    head = MlpHead(spec, inner, bool(config.get("scale_input", False)))
    return Plan(head, lambda name: name.removeprefix("speculator."), tied=tied)


# ------------------------------------------------------------------ shared
def table(source: Source, config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise source.fail(f"has a {key} in its config.json that is no JSON object: fetch the config again.")
    return found


def _spec(source: Source, kind: str, dialect: str, made_for: Any, **more: Any) -> HeadSpec:
    target = source.target
    fields = {"taps": (target.num_layers,), "draft_vocab_size": target.vocab_size, **more}
    name = made_for if isinstance(made_for, str) and made_for else None
    return HeadSpec(kind, target.hidden_size, target.vocab_size, target=name, dialect=dialect, **fields)


def layer_config(source: Source, config: dict[str, Any], kind: str, known: tuple[str, ...]) -> Any:
    """transformers' config of a head's layers, of the keys that matter to them."""
    from transformers import AutoConfig

    if kind not in known:
        raise source.fail(
            f"has layers of type {kind!r}, which Headstart does not run in heads; it runs {' and '.join(known)}."
        )
    values = {k: config[k] for k in LAYER_KEYS if config.get(k) is not None}
    try:
        made = AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers raises of many kinds
        raise source.fail(f"has a config.json that transformers refuses: {' '.join(str(error).split())}.") from error
    if made.hidden_act != "silu":
        raise source.fail(f"has layers with the activation {made.hidden_act!r}; Headstart runs silu in heads.")
    if "sliding_attention" in (getattr(made, "layer_types", None) or []) or config.get("use_sliding_window"):
        raise source.fail("has layers with sliding attention, which Headstart does not support in heads.")
    sizes = (made.hidden_size, made.num_hidden_layers, made.num_attention_heads, made.num_key_value_heads)
    if min(sizes) < 1 or made.num_attention_heads % made.num_key_value_heads:
        raise source.fail("has sizes in its config.json that no transformer layer can have: fetch the config again.")
    if {**config, **(made.rope_parameters or {})}.get("partial_rotary_factor", 1) != 1:
        raise source.fail("rotates a part of each head only (partial_rotary_factor), which Headstart does not support.")
    return made


def misshapen(source: Source, name: str, wanted: Iterable[int]) -> ModelError:
    return source.fail(
        f"holds tensor {name!r} of shape {list(source.shapes[name])} where {list(wanted)} is needed: "
        "its config.json and its weights do not belong together."
    )
