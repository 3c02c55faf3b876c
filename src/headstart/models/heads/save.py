"""Write heads as folders that others read too.

EAGLE-3 in the speculators format, which vLLM and llama.cpp's converter read. That format has neither Medusa nor the MLP
speculator. The latter goes into IBM's own dialect, which vLLM reads. Of Medusa there are two, with different names for the same
tensors: vLLM's, and that of the Medusa project, which vLLM passes over without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headstart.errors import ModelError
from headstart.models.heads.dialects import BORROWS, TargetFacts
from headstart.models.heads.eagle import Eagle3Head
from headstart.models.heads.medusa import MedusaHead
from headstart.models.heads.mlp import MlpHead

FORMAT = "0.9.0"  # of speculators, whose reading of these files was tried
WEIGHTS = {"model.safetensors", "medusa_lm_head.pt"}
MEDUSA_DIALECTS = {"vllm": "vLLM's for Medusa", "medusa": "that of the Medusa project"}
LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "attention_bias",
)  # fmt: skip


def save_eagle3(
    head: Eagle3Head, folder: Path, target_name: str, tokens: int, embeddings: bool = True, output: bool = True
) -> None:
    """`tokens` is how many are drafted where nobody says. Files that are there are replaced, each at once.

    Without `embeddings` a loader takes the target's, as vLLM does too. Without `output` it takes the target's rows of the
    head's vocabulary: for heads that kept them as they were, and for Headstart alone.
    """
    if head.flags.norm_before_fc and head.flags.fc_norm:
        raise ModelError(
            "A head with both norm_before_fc and fc_norm cannot be saved: the format has one or the other."
        )
    left_out = [n for n, kept in (("embed_tokens.weight", embeddings), ("lm_head.weight", output)) if not kept]
    tensors = {name: _alone(tensor) for name, tensor in head.state_dict().items() if name not in left_out}
    config = make_config(head, target_name, tokens) | ({} if output else {BORROWS: True})
    _write(folder, config, tensors)


def learned(head: Eagle3Head, target: TargetFacts) -> list[str]:
    """Which of the tensors that a file may leave to the target are not the target's."""

    def same(own: torch.Tensor, theirs: torch.Tensor | None, rows: torch.Tensor | None = None) -> bool:
        if theirs is None:
            return False
        return torch.equal(own, (theirs if rows is None else theirs[rows]).to(own.dtype))

    found = {
        "embeddings": same(head.embed_tokens.weight, target.embedding),
        "output matrix": same(head.lm_head.weight, target.lm_head, head.targets),
    }
    return [name for name, lent in found.items() if not lent]


def make_config(head: Eagle3Head, target_name: str, tokens: int) -> dict[str, Any]:
    import transformers

    spec = head.spec
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT,
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": None if spec.hidden_size == head.config.hidden_size else spec.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(spec.taps),
        **asdict(head.flags),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        "has_no_defaults_at_init": False,
        "transformers_version": transformers.__version__,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": layer_dict(head),
    }


def layer_dict(head: Eagle3Head) -> dict[str, Any]:
    """Written out in full: what a reader's transformers would fill in may change."""
    config = head.config
    found = {key: getattr(config, key) for key in LAYER_KEYS}
    found["head_dim"] = head.layers[0].self_attn.dim
    found["mlp_bias"] = getattr(config, "mlp_bias", False)
    return {**found, "tie_word_embeddings": False, "vocab_size": head.spec.vocab_size}


# ------------------------------------------------------------------ Medusa and MLP
def save_medusa(head: MedusaHead, folder: Path, target_name: str, dialect: str = "vllm") -> None:
    """`dialect` is one of MEDUSA_DIALECTS."""
    spec, blocks = head.spec, head.blocks
    tensors = {name.removeprefix("heads."): _alone(tensor) for name, tensor in head.state_dict().items()}
    if dialect == "medusa":
        sizes = {"medusa_num_heads": spec.max_depth, "medusa_num_layers": blocks}
        _write(folder, sizes | {"base_model_name_or_path": target_name}, tensors, "medusa_lm_head.pt")
        return
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_heads": spec.max_depth,
        "num_hidden_layers": blocks,
        "medusa_fc_bias": "0.0.linear.bias" in tensors,
        "base_model_name_or_path": target_name,
        "dtype": _dtype(tensors),
    }
    _write(folder, config, {_vllm_medusa_name(name, blocks): tensor for name, tensor in tensors.items()})


def _vllm_medusa_name(name: str, blocks: int) -> str:
    """`0.1.linear.weight` -> `blocks.0.layers.1.weight`; the last of a level is its output matrix."""
    level, part, rest = name.split(".", 2)
    return f"lm_heads.{level}.{rest}" if int(part) == blocks else f"blocks.{level}.layers.{part}.{rest[7:]}"


def save_mlp(head: MlpHead, folder: Path) -> None:
    """Weights that levels share are written once, as the first level's."""
    spec = head.spec
    first: dict[int, str] = {}
    for name, tensor in head.state_dict().items():
        first.setdefault(tensor.data_ptr(), name)
    tensors = {f"speculator.{name}": _alone(head.state_dict()[name]) for name in first.values()}
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": spec.vocab_size,
        "emb_dim": spec.hidden_size,
        "inner_dim": head.inner,
        "n_predict": spec.max_depth,
        "n_candidates": spec.max_depth,
        "top_k_tokens_per_head": [1] * (spec.max_depth or 0),
        "scale_input": head.scale_input,
        "tie_weights": head.tied,
        "dtype": _dtype(tensors),
    }
    _write(folder, config, tensors)


# ------------------------------------------------------------------ files
def _dtype(tensors: dict[str, torch.Tensor]) -> str:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def _write(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = "model.safetensors"
) -> None:
    """Each file at once. Weights under the other name, of an earlier run, go: a reader might take them."""
    from safetensors.torch import save_file

    def weights(path: Path) -> None:
        if name.endswith(".safetensors"):
            save_file(tensors, path, metadata={"format": "pt"})
        else:
            torch.save(tensors, path)

    text = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for other in WEIGHTS - {name}:
        (folder / other).unlink(missing_ok=True)
    _replace(folder / name, weights)
    _replace(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: tensors that share memory, such as tied ones, are written one by one."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """All of the new file or all of the old, whatever happens in between."""
    part = path.with_name(path.name + ".part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
