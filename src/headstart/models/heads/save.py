"""Write an EAGLE-3 head as a folder in the speculators format, which vLLM and llama.cpp's converter read too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headstart.errors import ModelError
from headstart.models.heads.dialects import BORROWS
from headstart.models.heads.eagle import Eagle3Head

FORMAT = "0.9.0"  # of speculators, whose reading of these files was tried
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
    from safetensors.torch import save_file

    left_out = [n for n, kept in (("embed_tokens.weight", embeddings), ("lm_head.weight", output)) if not kept]
    tensors = {name: _alone(tensor) for name, tensor in head.state_dict().items() if name not in left_out}
    config = make_config(head, target_name, tokens) | ({} if output else {BORROWS: True})
    text = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    _replace(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


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
