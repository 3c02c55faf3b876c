"""vLLM's speculators reads what Headstart writes: every tensor is in its place, and its own forward drafts the same."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("speculators") is None:
    pytest.skip("speculators is not installed here: make peers", allow_module_level=True)

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import Qwen3Config
from typer.testing import CliRunner

from headstart.cli import app
from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head
from headstart.models.heads.save import LAYER_KEYS, save_eagle3
from headstart.models.load import load, resolve
from headstart.train import eagle3
from tests import tiny
from tests.test_train import TAPS, drafts_at_inference

LEVELS = 3
PLAIN, OURS = Eagle3Flags(), Eagle3Flags(True, True, False, True)  # nothing normed; what `headstart train` makes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def target(folder: str) -> Any:
    return load(folder, "cpu", "float32", runner="torch").model


def make_head(
    target: Any, flags: Eagle3Flags, kind: str = "llama", layers: int = 1, draft: int | None = 120
) -> Eagle3Head:
    """Random in every weight. None: the target's whole vocabulary."""
    torch.manual_seed(0)
    config = eagle3.layer_config(target.config, layers, None, None)
    if kind == "qwen3":
        config = Qwen3Config(**{key: getattr(config, key) for key in LAYER_KEYS if key != "model_type"})
    vocab = target.config.vocab_size
    choices = torch.arange(vocab) if draft is None else torch.arange(draft) * 3 + 1
    head = eagle3.make_head(target, config, flags, TAPS, choices, "")
    with torch.no_grad():
        for p in head.parameters():
            made = torch.randn_like(p)
            p.copy_(made * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + 0.3 * made)
    return head.eval()


def read_by_peer(path: Path, verifier: str | None = None) -> Any:
    """As speculators loads it. `verifier`: where the target lies here, instead of the name that the config has."""
    config = SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # the default one is made for GPUs
    if verifier:
        config.speculators_config.verifier.name_or_path = verifier
    return SpeculatorModel.from_pretrained(path, config=config, dtype=config.dtype).eval()


def assert_same_tensors(peer: Any, ours: dict[str, torch.Tensor]) -> None:
    theirs = {n: t for n, t in peer.state_dict().items() if not n.startswith("verifier_")}
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype and torch.equal(theirs[name], tensor), name


def assert_same_drafts(peer: Any, head: Eagle3Head, target: Any) -> None:
    """Logits of every row and level, for the target's own hidden states."""
    tokens = torch.randint(1, target.config.vocab_size, (14,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        hidden = target(tokens[None], output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i][0] for i in head.spec.taps], -1)
        theirs: list[torch.Tensor] = []
        hook = peer.lm_head.register_forward_hook(lambda module, given, out: theirs.append(out[0]))
        peer(features[None, :-1], tokens[None, 1:], torch.zeros(1, len(tokens) - 1, dtype=torch.long), ttt_steps=LEVELS)
        hook.remove()
        ours = drafts_at_inference(head, features, tokens.tolist(), LEVELS)
        assert len(theirs) == LEVELS and len(ours) > 2 * len(tokens)
        for (row, level), state in ours.items():
            torch.testing.assert_close(theirs[level][row], head.logits(level, state), atol=2e-4, rtol=1e-4)


# ------------------------------------------------------------------ what `train` writes
@pytest.mark.parametrize("kind, layers, draft", [("llama", 1, 120), ("llama", 2, None), ("qwen3", 1, 120)])
@pytest.mark.parametrize("flags", [PLAIN, OURS, Eagle3Flags(False, False, True, False)])
def test_a_saved_head(
    tmp_path: Path, folder: str, target: Any, flags: Eagle3Flags, kind: str, layers: int, draft: int | None
):
    head = make_head(target, flags, kind, layers, draft)
    save_eagle3(head, tmp_path, folder, 5)
    peer = read_by_peer(tmp_path)
    assert_same_tensors(peer, head.state_dict())
    assert_same_drafts(peer, head, target)
    assert peer.config.eagle_aux_hidden_state_layer_ids == list(TAPS)
    assert peer.config.speculators_config.proposal_methods[0].speculative_tokens == 5


def test_it_does_not_take_embeddings_of_the_target(tmp_path: Path, folder: str, target: Any):
    """It leaves them random where a checkpoint has none, though it reads the target: so `convert` writes them."""
    save_eagle3(make_head(target, OURS), tmp_path, folder, 5, embeddings=False)
    peer = read_by_peer(tmp_path)
    assert not torch.equal(peer.embed_tokens.weight, target.get_input_embeddings().weight)
    assert not peer.verifier_lm_head.weight.isnan().any()


def test_a_wrong_weight_is_noticed(tmp_path: Path, folder: str, target: Any):
    """So that the comparison of drafts can fail."""
    head = make_head(target, OURS)
    save_eagle3(head, tmp_path, folder, 5)
    peer = read_by_peer(tmp_path)
    with torch.no_grad():
        head.layers[0].self_attn.k_proj.weight[0].mul_(1.5)
    with pytest.raises(AssertionError):
        assert_same_drafts(peer, head, target)


# ------------------------------------------------------------------ what `convert` writes
def convert(*args: str) -> None:
    done = CliRunner().invoke(app, ["convert", *args, "--dtype", "float32"])
    assert done.exit_code == 0, done.output


def as_speculators(head: Eagle3Head, out: Path, verifier: str) -> None:
    save_eagle3(head, out, verifier, 3)


def flat_config(head: Eagle3Head, verifier: str, architecture: str) -> dict[str, Any]:
    own = {key: getattr(head.config, key) for key in LAYER_KEYS} | {"vocab_size": head.spec.vocab_size}
    aux = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}}
    more = {"architectures": [architecture], "draft_vocab_size": head.spec.draft_vocab_size}
    return own | aux | more | {"target_model_name_or_path": verifier}


def midlayer(head: Eagle3Head) -> dict[str, torch.Tensor]:
    return {n.replace("layers.0.", "midlayer."): t.clone() for n, t in head.state_dict().items()}


def as_original(head: Eagle3Head, out: Path, verifier: str) -> None:
    """A pickle, without embeddings."""
    tensors = midlayer(head)
    del tensors["embed_tokens.weight"]
    torch.save(tensors, out / "pytorch_model.bin")
    (out / "config.json").write_text(json.dumps(flat_config(head, verifier, "LlamaForCausalLM")))


def as_specforge(head: Eagle3Head, out: Path, verifier: str) -> None:
    """With maps of the vocabulary that say nothing."""
    vocab = head.spec.vocab_size
    maps = {"d2t": torch.zeros(vocab, dtype=torch.int64), "t2d": torch.ones(vocab, dtype=torch.bool)}
    save_file(midlayer(head) | maps, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(flat_config(head, verifier, "LlamaForCausalLMEagle3")))


@pytest.mark.parametrize(
    "write, flags, draft",
    [(as_speculators, OURS, 120), (as_original, PLAIN, 120), (as_specforge, PLAIN, None)],
    ids=["speculators", "original", "specforge"],
)
def test_a_converted_head(tmp_path: Path, folder: str, target: Any, write: Any, flags: Eagle3Flags, draft: int | None):
    head = make_head(target, flags, draft=draft)
    if write is as_original:
        with torch.no_grad():
            head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    source = tmp_path / "source"
    source.mkdir()
    write(head, source, folder)
    convert(str(source), "--out", str(tmp_path / "out"), "--target", folder)
    peer = read_by_peer(tmp_path / "out")
    assert_same_tensors(peer, head.state_dict())
    assert_same_drafts(peer, head, target)


@pytest.mark.real
def test_the_head_that_comes_along(tmp_path: Path):
    """The target lies here in Headstart's cache; the config names it as the hub does."""
    convert("smollm2", "--out", str(tmp_path))
    named = json.loads((tmp_path / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]
    assert named == "HuggingFaceTB/SmolLM2-135M-Instruct"
    peer = read_by_peer(tmp_path, str(resolve("smollm2")))
    assert_same_tensors(peer, load_file(tmp_path / "model.safetensors"))
    model = load("smollm2", "cpu", "float32", runner="torch")
    from headstart.models.heads.load import TargetFacts, load_head

    head = load_head(tmp_path, TargetFacts.of(named, model.model), torch.device("cpu"), torch.float32)
    assert isinstance(head, Eagle3Head)
    assert_same_drafts(peer, head, model.model)
