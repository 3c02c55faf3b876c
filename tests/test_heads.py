"""Heads of every dialect, written as their projects write them, against a forward in plain torch; and what is refused.

The reference below computes whole sequences under an explicit mask, anew for each level, from the file's own tensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.errors import ModelError
from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head
from headstart.models.heads.load import TargetFacts, load_head
from headstart.models.heads.save import save_eagle3

H, HEADS, KV, DIM, INTER, VOCAB, DRAFT, LAYERS, EPS = 16, 4, 2, 8, 24, 40, 12, 9, 1e-5
TEXT = torch.tensor([3, 17, 39, 0, 8, 21])
CHAIN = [5, 30]  # the tokens drafted at levels 0 and 1, in the target's vocabulary
LLAMA = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": INTER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM, "hidden_act": "silu",
    "rms_norm_eps": EPS, "max_position_embeddings": 64, "vocab_size": VOCAB,
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(0)
Tensors = dict[str, torch.Tensor]


# ------------------------------------------------------------------ small things
def random(*shape: int) -> torch.Tensor:
    """Matrices that keep the size of what they multiply, vectors around one."""
    made = torch.randn(*shape, generator=GENERATOR)
    return made / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.3 * made


EMBEDDING, LM_HEAD = random(VOCAB, H), random(VOCAB, H)  # of the target


def facts(**changed: Any) -> TargetFacts:
    return replace(TargetFacts("org/Tiny-Target", H, VOCAB, LAYERS, EMBEDDING, LM_HEAD), **changed)


def load(folder: Path, **changed: Any) -> Any:
    return load_head(folder, facts(**changed), torch.device("cpu"), torch.float64)


def write(folder: Path, config: dict[str, Any], tensors: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / name)
    return folder


class Lists:
    """The smallest context: one text, and every row sees what was before it and itself."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def attend(self, layer, query, key, value, scale, window=None, softcap=None, sinks=None):
        self.keys[layer] = torch.cat([self.keys[layer], key]) if layer in self.keys else key
        self.values[layer] = torch.cat([self.values[layer], value]) if layer in self.values else value
        share, before = query.shape[1] // key.shape[1], len(self.keys[layer]) - len(query)
        k, v = (x[layer].repeat_interleave(share, 1) for x in (self.keys, self.values))
        scores = torch.einsum("thd,shd->hts", query, k) * scale
        hidden = torch.arange(len(k)) > before + torch.arange(len(query))[:, None]
        return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def features(head: Any) -> torch.Tensor:
    made = torch.randn(len(TEXT) - 1, len(head.spec.taps) * H, generator=torch.Generator().manual_seed(77))
    return made.double()


@torch.inference_mode()
def run(head: Any) -> list[torch.Tensor]:
    """Logits of three levels, as a drafter asks for them."""
    context, count = Lists(), len(TEXT) - 1
    state = head.begin(features(head))
    state = head.advance(0, state, TEXT[1:], torch.arange(count), context)[-1:]
    out = [head.logits(0, state)[0]]
    for level, token in enumerate(CHAIN, 1):
        state = head.advance(level, state, torch.tensor([token]), torch.tensor([count + level - 1]), context)
        out.append(head.logits(level, state)[0])
    return out


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) == 3
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
    assert min(float(b.std()) for b in wanted) > 0.05, "logits so small that nothing was compared"


# ------------------------------------------------------------------ the reference
def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotated(x: torch.Tensor, theta: float, stretch: float) -> torch.Tensor:
    """x (S, heads, D) at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for position in range(len(x)):
        for i in range(half):
            angle = position / stretch * theta ** (-i / half)
            a, b = x[position, :, i], x[position, :, i + half]
            out[position, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(x: torch.Tensor, w: Tensors, theta: float, stretch: float) -> torch.Tensor:
    """x (S, inputs) -> (S, hidden), causal."""

    def project(name: str) -> torch.Tensor:
        return (x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)).view(len(x), -1, DIM)

    q, k, v = (project(n) for n in ("q_proj", "k_proj", "v_proj"))
    if "q_norm.weight" in w:
        q, k = rms(q, w["q_norm.weight"]), rms(k, w["k_norm.weight"])
    q, k = rotated(q, theta, stretch), rotated(k, theta, stretch)
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)
    out = []
    for head in range(HEADS):
        own = head // (HEADS // KV)
        out.append((q[:, head] @ k[:, own].T / math.sqrt(DIM) + mask).softmax(-1) @ v[:, own])
    return torch.cat(out, -1) @ w["o_proj.weight"].T + w.get("o_proj.bias", 0)


def under(w: Tensors, prefix: str) -> Tensors:
    return {n.removeprefix(prefix): t for n, t in w.items() if n.startswith(prefix)}


def swiglu(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    gate = x @ w["gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T


def layer(rest: torch.Tensor, read: torch.Tensor, w: Tensors, theta: float, stretch: float) -> torch.Tensor:
    x = rest + attention(read, under(w, "self_attn."), theta, stretch)
    return x + swiglu(rms(x, w["post_attention_layernorm.weight"]), under(w, "mlp."))


def chain(begun: torch.Tensor, step: Any, speak: Any) -> list[torch.Tensor]:
    """Each level anew over the whole sequence: (S, H) inputs and S tokens -> (S, H) states; the last is appended."""
    inputs, tokens, out = begun, TEXT[1:], []
    for level in range(3):
        states = step(inputs, tokens)
        out.append(speak(states[-1]))
        if level < 2:
            inputs = torch.cat([inputs, states[-1:]])
            tokens = torch.cat([tokens, torch.tensor([CHAIN[level]])])
    return out


def eagle3_reference(
    file: Tensors, features: torch.Tensor, flags: Eagle3Flags, theta: float = 10000.0, stretch: float = 1.0
) -> list[torch.Tensor]:
    w = {n.replace("midlayer.", "layers.0."): t.double() for n, t in file.items()}
    embedding = w.get("embed_tokens.weight", EMBEDDING.double())
    lm_head = w.get("lm_head.weight", LM_HEAD.double())
    if flags.norm_before_fc:
        features = rms(features, w["input_norm.weight"])
    if flags.fc_norm:
        parts = [rms(features[:, i * H : (i + 1) * H], w[f"fc_norm.{i}.weight"]) for i in range(features.shape[1] // H)]
        features = torch.cat(parts, -1)

    def step(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        first = under(w, "layers.0.")
        normed = rms(x, first["hidden_norm.weight"])
        read = torch.cat([rms(embedding[tokens], first["input_layernorm.weight"]), normed], -1)
        x = layer(normed if flags.norm_before_residual else x, read, first, theta, stretch)
        index = 1
        while more := under(w, f"layers.{index}."):
            x = layer(x, rms(x, more["input_layernorm.weight"]), more, theta, stretch)
            index += 1
        return rms(x, w["norm.weight"]) if flags.norm_output else x

    def speak(state: torch.Tensor) -> torch.Tensor:
        return lm_head @ (state if flags.norm_output else rms(state, w["norm.weight"]))

    return chain(features @ w["fc.weight"].T, step, speak)


# ------------------------------------------------------------------ checkpoints
def layer_tensors(inputs: int, kind: str = "llama", bias: bool = False) -> Tensors:
    w = {f"self_attn.{n}_proj.weight": random(c * DIM, inputs) for n, c in (("q", HEADS), ("k", KV), ("v", KV))}
    w["self_attn.o_proj.weight"] = random(H, HEADS * DIM)
    if bias:
        w |= {n.replace("weight", "bias"): random(len(t)) for n, t in w.items()}
    if kind == "qwen3":
        w |= {f"self_attn.{n}_norm.weight": random(DIM) for n in "qk"}
    w |= {"mlp.gate_proj.weight": random(INTER, H), "mlp.up_proj.weight": random(INTER, H)}
    w |= {"mlp.down_proj.weight": random(H, INTER), "post_attention_layernorm.weight": random(H)}
    return w | {"input_layernorm.weight": random(H)}


def prefixed(prefix: str, w: Tensors) -> Tensors:
    return {prefix + n: t for n, t in w.items()}


def vocabulary(draft: int) -> Tensors:
    """Every third token of the target."""
    chosen = torch.arange(draft) * 3
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    return {"d2t": chosen - torch.arange(draft), "t2d": t2d}


def eagle3_tensors(
    flags: Eagle3Flags = Eagle3Flags(), draft: int = DRAFT, layers: int = 1, kind: str = "llama", bias: bool = False
) -> Tensors:
    w = {"embed_tokens.weight": random(VOCAB, H), "fc.weight": random(H, 3 * H), "norm.weight": random(H)}
    w |= {"lm_head.weight": random(draft, H), "layers.0.hidden_norm.weight": random(H)}
    for i in range(layers):
        w |= prefixed(f"layers.{i}.", layer_tensors(H if i else 2 * H, kind, bias))
    if flags.norm_before_fc:
        w["input_norm.weight"] = random(3 * H)
    if flags.fc_norm:
        w |= {f"fc_norm.{i}.weight": random(H) for i in range(3)}
    return w | (vocabulary(draft) if draft != VOCAB else {})


def speculators_config(flags: Eagle3Flags = Eagle3Flags(), draft: int = DRAFT, **inner: Any) -> dict[str, Any]:
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0.dev5",
        "draft_vocab_size": draft,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
        **asdict(flags),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": "org/tiny-target", "architectures": []},
        },
        "transformer_layer_config": {**LLAMA, **inner},
    }


def midlayer(w: Tensors) -> Tensors:
    return {n.replace("layers.0.", "midlayer."): t for n, t in w.items()}


FLAT = LLAMA | {
    "architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT,
    "pad_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
}  # fmt: skip


# ------------------------------------------------------------------ EAGLE-3
ALL_FLAGS = [Eagle3Flags(*bits) for bits in product((False, True), repeat=4)]


@pytest.mark.parametrize("flags", ALL_FLAGS, ids=lambda f: "".join(str(int(b)) for b in asdict(f).values()))
def test_speculators_computes_what_its_flags_say(tmp_path: Path, flags: Eagle3Flags):
    w = eagle3_tensors(flags)
    head = load(write(tmp_path, speculators_config(flags), w))
    assert head.flags == flags and head.spec.taps == (1, 4, 7) and head.spec.dialect == "speculators"
    same(run(head), eagle3_reference(w, features(head), flags))


def test_each_flag_changes_what_is_computed():
    """So that the comparison above can fail."""
    both = Eagle3Flags(norm_before_fc=True, fc_norm=True)
    w = eagle3_tensors(both)
    inputs = torch.randn(len(TEXT) - 1, 3 * H, generator=torch.Generator().manual_seed(77)).double()
    all_logits = [torch.stack(eagle3_reference(w, inputs, flags)) for flags in ALL_FLAGS]
    for i, a in enumerate(all_logits):
        for b in all_logits[:i]:
            assert float((a - b).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("draft", [DRAFT, VOCAB])
@pytest.mark.parametrize("bias", [False, True])
def test_speculators_layers_and_vocabularies(tmp_path: Path, kind: str, layers: int, draft: int, bias: bool):
    flags = Eagle3Flags(norm_before_residual=True)
    w = eagle3_tensors(flags, draft, layers, kind, bias)
    config = speculators_config(flags, draft, model_type=kind, num_hidden_layers=layers, attention_bias=bias)
    head = load(write(tmp_path, config, w))
    same(run(head), eagle3_reference(w, features(head), flags))
    assert len(head.shapes) == layers and (head.shapes[0].kv_heads, head.shapes[0].key_dim) == (KV, DIM)
    if draft == VOCAB:
        assert head.targets is None
    else:
        assert head.targets.tolist() == [3 * i for i in range(DRAFT)]


@pytest.mark.parametrize(
    "rope, stretch",
    [
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, 1.0),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 2.0),
    ],
)
def test_rope_of_new_and_old_configs(tmp_path: Path, rope: dict[str, Any], stretch: float):
    w = eagle3_tensors()
    head = load(write(tmp_path, speculators_config(**rope), w))
    same(run(head), eagle3_reference(w, features(head), Eagle3Flags(), 500.0, stretch))


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_other_ropes_are_made_with_real_numbers(tmp_path: Path, kind: str):
    rope = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    head = load(write(tmp_path, speculators_config(rope_parameters=rope), eagle3_tensors()))
    assert all(bool(x.isfinite().all()) for x in run(head))


def test_original_eagle3_is_a_pickle_without_embeddings(tmp_path: Path):
    w = midlayer(eagle3_tensors())
    del w["embed_tokens.weight"]
    head = load(write(tmp_path, FLAT, w, "pytorch_model.bin"))
    assert head.flags == Eagle3Flags() and head.spec.taps == (2, 4, 6) and head.spec.dialect == "eagle3"
    same(run(head), eagle3_reference(w, features(head), Eagle3Flags()))


def test_specforge_writes_maps_that_say_nothing(tmp_path: Path):
    w = midlayer(eagle3_tensors(draft=VOCAB))
    w |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    config = FLAT | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}  # counted from the output of layer 0
    head = load(write(tmp_path / "a", config, w))
    assert head.spec.taps == (2, 4, 6) and head.targets is None
    same(run(head), eagle3_reference(w, features(head), Eagle3Flags()))
    w["d2t"] = w["d2t"].index_fill(0, torch.tensor([1]), 1)
    with pytest.raises(ModelError, match="reorders a whole vocabulary with 'd2t'"):
        load(write(tmp_path / "b", config, w))


def test_specforge_eagle31_has_norms_of_features(tmp_path: Path):
    flags = Eagle3Flags(fc_norm=True, norm_output=True)
    w = midlayer(eagle3_tensors(flags))
    head = load(write(tmp_path, FLAT | {"fc_norm": True, "norm_output": True}, w))
    same(run(head), eagle3_reference(w, features(head), flags))


def test_a_full_head_may_share_both_matrices(tmp_path: Path):
    w = eagle3_tensors(draft=VOCAB)
    del w["embed_tokens.weight"], w["lm_head.weight"]
    head = load(write(tmp_path, speculators_config(draft=VOCAB), w))
    same(run(head), eagle3_reference(w, features(head), Eagle3Flags()))
    with pytest.raises(ModelError, match=r"would share that of org/Tiny-Target.*runner='torch'"):
        load(tmp_path, lm_head=None)


def test_shared_weights_take_no_memory(tmp_path: Path):
    w = eagle3_tensors()
    del w["embed_tokens.weight"]
    write(tmp_path, speculators_config(), w)
    head = load_head(tmp_path, facts(), torch.device("cpu"), torch.float32)
    assert head.embed_tokens.weight.data_ptr() == EMBEDDING.data_ptr()
    assert not any(p.requires_grad for p in head.parameters()) and not head.training


def test_what_speculators_leaves_out_is_false_and_said(tmp_path: Path, capsys):
    config = speculators_config()
    for key in asdict(Eagle3Flags()):
        del config[key]
    config["eagle_aux_hidden_state_layer_ids"] = None
    head = load(write(tmp_path, config, eagle3_tensors()))
    assert head.flags == Eagle3Flags() and head.spec.taps == (2, LAYERS // 2, LAYERS - 3)
    assert "norm_before_residual: taken as false" in capsys.readouterr().err


def test_what_is_for_training_only_is_passed_over(tmp_path: Path):
    w = eagle3_tensors()
    more = {"verifier_lm_head.weight": random(DRAFT, H), "verifier_norm.weight": random(H)}
    more["layers.0.self_attn.rotary_emb.inv_freq"] = random(DIM // 2)
    head = load(write(tmp_path, speculators_config(), w | more))
    same(run(head), eagle3_reference(w, features(head), Eagle3Flags()))


def test_a_missing_t2d_is_made(tmp_path: Path):
    w = eagle3_tensors()
    wanted = w.pop("t2d")
    assert torch.equal(load(write(tmp_path, speculators_config(), w)).t2d, wanted)


def test_a_t2d_that_disagrees_is_said(tmp_path: Path, capsys):
    w = eagle3_tensors()
    w["t2d"] = ~w["t2d"]
    assert load(write(tmp_path, speculators_config(), w)).targets.tolist() == [3 * i for i in range(DRAFT)]
    assert "only 'd2t' is used" in capsys.readouterr().err


def test_a_head_of_another_target_is_a_note(tmp_path: Path, capsys):
    write(tmp_path, speculators_config(), eagle3_tensors())
    load(tmp_path)
    assert not capsys.readouterr().err, "the last part of the name is the same but for its case"
    load(tmp_path, name="elsewhere/Other")
    assert "was trained for org/tiny-target, not for elsewhere/Other" in capsys.readouterr().err


def test_a_head_may_be_narrower_than_its_target(tmp_path: Path):
    w = eagle3_tensors()
    w["fc.weight"] = random(H, 3 * 2 * H)
    config = speculators_config() | {"target_hidden_size": 2 * H}
    head = load(write(tmp_path, config, w), hidden_size=2 * H)
    assert head.begin(torch.ones(1, 6 * H, dtype=torch.float64)).shape == (1, H)
    del w["embed_tokens.weight"]  # the target's has another width
    with pytest.raises(ModelError, match=r"lacks the tensor 'embed_tokens.weight'"):
        load(write(tmp_path, config, w), hidden_size=2 * H)


# ------------------------------------------------------------------ EAGLE-1
def eagle1_tensors(bias: bool, layers: int = 1, qkv_bias: bool = False) -> Tensors:
    w = {"embed_tokens.weight": random(VOCAB, H), "fc.weight": random(H, 2 * H)}
    if bias:
        w["fc.bias"] = random(H)
    for i in range(layers):
        own = layer_tensors(H, bias=qkv_bias)
        own.pop("self_attn.o_proj.bias", None)
        if i == 0:
            del own["input_layernorm.weight"]
        w |= prefixed(f"layers.{i}.", own)
    return w


def eagle1_reference(file: Tensors, features: torch.Tensor) -> list[torch.Tensor]:
    w = {n: t.double() for n, t in file.items()}
    embedding = w.get("embed_tokens.weight", EMBEDDING.double())

    def step(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.cat([embedding[tokens], x], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        index = 0
        while own := under(w, f"layers.{index}."):
            x = layer(x, rms(x, own["input_layernorm.weight"]) if index else x, own, 10000.0, 1.0)
            index += 1
        return x

    return chain(features, step, lambda state: LM_HEAD.double() @ state)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_eagle1(tmp_path: Path, bias: bool, layers: int, qkv_bias: bool):
    w = eagle1_tensors(bias, layers, qkv_bias)
    config = {k: v for k, v in FLAT.items() if k != "draft_vocab_size"} | {"num_hidden_layers": layers}
    config |= {"qkv_bias": True, "model_type": "qwen2"} if qkv_bias else {}
    head = load(write(tmp_path, config, w, "pytorch_model.bin"))
    assert head.spec.kind == "eagle" and head.spec.taps == (LAYERS,) and len(head.shapes) == layers
    same(run(head), eagle1_reference(w, features(head)))


def test_eagle1_as_its_config_says(tmp_path: Path):
    w = eagle1_tensors(bias=True)
    config = {k: v for k, v in FLAT.items() if k != "draft_vocab_size"}
    with pytest.raises(ModelError, match=r"tensor 'fc\.bias' that its config\.json leaves no place for"):
        load(write(tmp_path, config | {"bias": False}, w))
    del w["fc.bias"], w["embed_tokens.weight"]
    with pytest.raises(ModelError, match=r"lacks the tensor 'fc\.bias'"):
        load(write(tmp_path, config | {"bias": True}, w))
    head = load(write(tmp_path, config | {"bias": False}, w))
    same(run(head), eagle1_reference(w, features(head)))


# ------------------------------------------------------------------ MTP
def mtp_tensors(kind: str = "llama", bias: bool = False) -> Tensors:
    w = layer_tensors(H, kind, bias)
    if kind == "qwen2":
        del w["self_attn.o_proj.bias"]
    w |= {"enorm.weight": random(H), "hnorm.weight": random(H), "eh_proj.weight": random(H, 2 * H)}
    w |= {"shared_head.norm.weight": random(H), "shared_head.head.weight": random(VOCAB, H)}
    return prefixed(f"model.layers.{LAYERS}.", w | {"embed_tokens.weight": random(VOCAB, H)})


def mtp_reference(file: Tensors, features: torch.Tensor) -> list[torch.Tensor]:
    w = {n: t.double() for n, t in under(file, f"model.layers.{LAYERS}.").items()}
    embedding = w.get("embed_tokens.weight", EMBEDDING.double())
    lm_head = w.get("shared_head.head.weight", LM_HEAD.double())

    def step(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([rms(embedding[tokens], w["enorm.weight"]), rms(x, w["hnorm.weight"])], -1)
        x = joined @ w["eh_proj.weight"].T
        return rms(layer(x, rms(x, w["input_layernorm.weight"]), w, 10000.0, 1.0), w["shared_head.norm.weight"])

    return chain(features, step, lambda state: lm_head @ state)


MTP = LLAMA | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1, "architectures": ["TinyForCausalLM"]}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_mtp_in_a_folder_of_its_own(tmp_path: Path, kind: str):
    w = mtp_tensors(kind, bias=kind == "qwen2")
    head = load(write(tmp_path, MTP | {"model_type": kind, "use_sliding_window": False}, w))
    assert head.spec.kind == "mtp" and head.spec.taps == (LAYERS,) and head.spec.max_depth is None
    same(run(head), mtp_reference(w, features(head)))


def test_mtp_in_the_folder_of_its_target(tmp_path: Path):
    w = mtp_tensors()
    del w[f"model.layers.{LAYERS}.embed_tokens.weight"], w[f"model.layers.{LAYERS}.shared_head.head.weight"]
    theirs = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": LM_HEAD}
    theirs |= prefixed("model.layers.0.", layer_tensors(H)) | {"model.norm.weight": random(H)}
    write(tmp_path, MTP, w | theirs)
    for embedding in (EMBEDDING, None):  # lent, or read from the folder
        head = load(tmp_path, embedding=embedding)
        same(run(head), mtp_reference(w, features(head)))


@pytest.mark.parametrize(
    "name, what",
    [
        ("self_attn.kv_a_proj_with_mqa.weight", r"latent attention \(MLA\)"),
        ("mlp.experts.0.gate_proj.weight", r"mixture of experts \(MoE\)"),
        ("mlp.gate.weight", r"mixture of experts \(MoE\)"),
    ],
)
def test_mtp_layers_that_are_not_run(tmp_path: Path, name: str, what: str):
    w = mtp_tensors() | {f"model.layers.{LAYERS}.{name}": random(4, H)}
    with pytest.raises(ModelError, match=what):
        load(write(tmp_path, MTP | {"model_type": "deepseek_v3"}, w))


def test_more_mtp_layers_than_one_are_refused(tmp_path: Path):
    w = mtp_tensors() | {f"model.layers.{LAYERS + 1}.enorm.weight": random(H)}
    with pytest.raises(ModelError, match="has 2 MTP layers"):
        load(write(tmp_path, MTP, w))


# ------------------------------------------------------------------ Medusa and MLP
def medusa_tensors(heads: int, blocks: int, bias: bool = True) -> Tensors:
    w: Tensors = {}
    for i, j in product(range(heads), range(blocks)):
        w[f"{i}.{j}.linear.weight"] = random(H, H)
        if bias:
            w[f"{i}.{j}.linear.bias"] = random(H)
    return w | {f"{i}.{blocks}.weight": random(VOCAB, H) for i in range(heads)}


def medusa_reference(file: Tensors, features: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    w = {n: t.double() for n, t in file.items()}
    out = []
    for i in range(3):
        x = features[-1]
        for j in range(blocks):
            y = w[f"{i}.{j}.linear.weight"] @ x + w.get(f"{i}.{j}.linear.bias", 0)
            x = x + y * torch.sigmoid(y)
        out.append(w[f"{i}.{blocks}.weight"] @ x)
    return out


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa(tmp_path: Path, blocks: int, name: str, capsys):
    w = medusa_tensors(4, blocks)
    config = {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    head = load(write(tmp_path, config, w, name))  # such a config says 2 where there are more
    assert head.spec.max_depth == 4 and head.spec.taps == (LAYERS,) and head.shapes == () and head.targets is None
    same(run(head), medusa_reference(w, features(head), blocks))
    assert "was trained for lmsys/vicuna-7b-v1.3" in capsys.readouterr().err
    state = torch.ones(1, H)
    assert head.advance(1, state, torch.tensor([1]), torch.tensor([3]), None) is state


def test_medusa_as_vllm_names_it(tmp_path: Path):
    w = medusa_tensors(3, 1, bias=False)
    named = {f"blocks.{i}.layers.0.weight": w[f"{i}.0.linear.weight"] for i in range(3)}
    named |= {f"lm_heads.{i}.weight": w[f"{i}.1.weight"] for i in range(3)}
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": H, "vocab_size": VOCAB}
    head = load(write(tmp_path, config, named))
    same(run(head), medusa_reference(w, features(head), 1))


def test_medusa_with_fewer_heads_than_it_says(tmp_path: Path):
    with pytest.raises(ModelError, match=r"lacks the tensor 'heads\.3\.0\.linear\.weight'"):
        load(write(tmp_path, {"medusa_num_heads": 4, "medusa_num_layers": 1}, medusa_tensors(3, 1)))


INNER = 10


def mlp_tensors(levels: int, tied: bool) -> Tensors:
    w: Tensors = {}
    for i in range(levels):
        if not tied or i < 2:
            w[f"proj.{i}.weight"] = random(INNER, INNER if i else H)
        if not tied or i < 1:
            w |= {f"emb.{i}.weight": random(VOCAB, INNER), f"head.{i}.weight": random(VOCAB, INNER)}
            w |= {f"ln.{i}.weight": random(INNER), f"ln.{i}.bias": random(INNER) - 1}
    return w


def mlp_reference(file: Tensors, features: torch.Tensor, levels: int, scale: bool) -> list[torch.Tensor]:
    w = {n: t.double() for n, t in file.items()}

    def at(name: str, part: str, i: int) -> torch.Tensor:
        return next(w[key] for j in range(i, -1, -1) if (key := f"{name}.{j}.{part}") in w)

    state_weight = 0.5 ** (0.5 / levels)
    emb_weight = math.sqrt((1 - state_weight**2) * (INNER / 2))
    x, out = features[-1], []
    if scale:
        x = rms(x, torch.tensor(1.0), 1e-6) / math.sqrt(2)
    for i, token in enumerate([int(TEXT[-1]), *CHAIN]):
        x = at("proj", "weight", i) @ x + emb_weight / state_weight * at("emb", "weight", i)[token]
        x = rms(x, at("ln", "weight", i), 1e-6) + at("ln", "bias", i)
        x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        out.append(at("head", "weight", i) @ x)
    return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_mlp_speculator(tmp_path: Path, tied: bool, scale: bool, prefix: str):
    w = mlp_tensors(4, tied)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": H,
        "n_predict": 4,
    }
    config |= {"inner_dim": INNER, "vocab_size": VOCAB, "tie_weights": tied, "scale_input": scale}
    head = load(write(tmp_path, config, prefixed(prefix, w)))
    assert head.spec.kind == "mlp" and head.spec.max_depth == 4 and head.shapes == ()
    same(run(head), mlp_reference(w, features(head), 4, scale))
    if tied:
        assert head.head[3].weight.data_ptr() == head.head[0].weight.data_ptr()
    else:
        del w["emb.2.weight"]
        with pytest.raises(ModelError, match=r"lacks the tensor 'emb\.2\.weight'"):
            load(write(tmp_path, config, prefixed(prefix, w)))


# ------------------------------------------------------------------ written by us
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("draft", [DRAFT, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_heads_load_bit_by_bit(tmp_path: Path, kind: str, draft: int, dtype: torch.dtype):
    flags = Eagle3Flags(norm_before_residual=True, fc_norm=True, norm_output=True)
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = speculators_config(flags, draft, model_type=kind, num_hidden_layers=2, rope_parameters=rope)
    folder = write(tmp_path / "a", config, eagle3_tensors(flags, draft, 2, kind))
    head = load_head(folder, facts(), torch.device("cpu"), dtype)
    save_eagle3(head, tmp_path / "b" / "c", "org/Tiny-Target", 5)
    again = load_head(tmp_path / "b" / "c", facts(), torch.device("cpu"), dtype)
    assert isinstance(again, Eagle3Head) and again.flags == flags and again.spec.taps == head.spec.taps
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert again.state_dict()[name].dtype == tensor.dtype and torch.equal(again.state_dict()[name], tensor), name
    assert all(torch.equal(a, b) for a, b in zip(run(head.double()), run(again.double()), strict=True))


def test_saved_config_has_the_keys_that_vllm_reads(tmp_path: Path):
    head = load(write(tmp_path / "a", speculators_config(), eagle3_tensors()))
    save_eagle3(head, tmp_path / "b", "org/Tiny-Target", 5)
    made = json.loads((tmp_path / "b" / "config.json").read_text())
    assert made.keys() >= speculators_config().keys()
    assert made["transformer_layer_config"].keys() >= {*LLAMA, "rope_parameters", "attention_bias", "mlp_bias"}
    assert made["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert made["speculators_config"]["verifier"] == {"name_or_path": "org/Tiny-Target", "architectures": []}
    assert made["transformer_layer_config"]["vocab_size"] == VOCAB and made["draft_vocab_size"] == DRAFT
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    assert tensors.keys() == eagle3_tensors().keys()
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]


def test_a_save_that_fails_leaves_the_old_head(tmp_path: Path, monkeypatch):
    head = load(write(tmp_path / "a", speculators_config(), eagle3_tensors()))
    save_eagle3(head, tmp_path / "b", "org/Tiny-Target", 5)
    before = {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}

    def fails(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        save_eagle3(head, tmp_path / "b", "org/Tiny-Target", 7)
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == before


def test_both_norms_before_fc_cannot_be_saved(tmp_path: Path):
    flags = Eagle3Flags(norm_before_fc=True, fc_norm=True)
    head = load(write(tmp_path / "a", speculators_config(flags), eagle3_tensors(flags)))
    with pytest.raises(ModelError, match="both norm_before_fc and fc_norm"):
        save_eagle3(head, tmp_path / "b", "org/Tiny-Target", 5)


# ------------------------------------------------------------------ refused
NEEDED = sorted(eagle3_tensors().keys() - {"embed_tokens.weight", "t2d"})


@pytest.mark.parametrize("name", NEEDED)
def test_each_tensor_is_needed(tmp_path: Path, name: str):
    w = eagle3_tensors()
    del w[name]
    with pytest.raises(ModelError, match=f"lacks the tensor '{name}'"):
        load(write(tmp_path, speculators_config(), w))


@pytest.mark.parametrize("name", sorted(eagle3_tensors()))
def test_each_tensor_has_a_shape(tmp_path: Path, name: str):
    w = eagle3_tensors()
    w[name] = torch.cat([w[name], w[name][:1]])
    with pytest.raises(ModelError, match=f"tensor '{name}' of shape .* is needed"):
        load(write(tmp_path, speculators_config(), w))


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "input_norm.weight", "mask_hidden", "fc.bias"])
def test_tensors_without_a_place(tmp_path: Path, name: str):
    w = eagle3_tensors() | {name: random(H)}
    with pytest.raises(ModelError, match=f"tensor '{name}' that its config.json leaves no place for"):
        load(write(tmp_path, speculators_config(), w))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_numbers_that_are_none(tmp_path: Path, bad: float, name: str):
    w = eagle3_tensors()
    w["layers.0.mlp.up_proj.weight"][3, 4] = bad
    with pytest.raises(ModelError, match=r"'layers\.0\.mlp\.up_proj\.weight' holds NaN or infinite"):
        load(write(tmp_path, speculators_config(), w, name))


def test_numbers_beyond_float16(tmp_path: Path):
    w = eagle3_tensors()
    w["fc.weight"][0, 0] = 1e6
    with pytest.raises(ModelError, match=r"'fc\.weight' has values beyond float16"):
        load_head(write(tmp_path, speculators_config(), w), facts(), torch.device("cpu"), torch.float16)


def test_quantised_heads(tmp_path: Path):
    w = eagle3_tensors()
    with pytest.raises(ModelError, match="is quantised"):
        load(write(tmp_path, speculators_config() | {"quantization_config": {"quant_method": "fp8"}}, w))
    w["fc.weight"] = w["fc.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ModelError, match=r"'fc\.weight' is of type float8_e4m3fn"):
        load(write(tmp_path, speculators_config(), w))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("left", [0.0, 0.1, 0.5, 0.95])
def test_truncated_files(tmp_path: Path, name: str, left: float):
    write(tmp_path, FLAT, midlayer(eagle3_tensors()), name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(left * len(whole))])
    with pytest.raises(ModelError, match="Fetch the file again") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


SIZES = [
    ({"hidden_size": 2 * H}, f"hidden size of {H}, and org/Tiny-Target has {2 * H}"),
    ({"vocab_size": VOCAB + 8}, f"vocabulary of {VOCAB}, and org/Tiny-Target has {VOCAB + 8}"),
]


def forbid_reading(monkeypatch) -> None:
    """Weights must not be looked at before sizes are."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("safetensors.safe_open", refuse)
    monkeypatch.setattr("headstart.models.heads.store.Store.weight", refuse)


@pytest.mark.parametrize("changed, message", SIZES)
@pytest.mark.parametrize("dialect", ["speculators", "flat", "eagle1", "mtp", "medusa", "mlp"])
def test_another_target_is_refused_unread(tmp_path: Path, monkeypatch, dialect: str, changed: Any, message: str):
    mlp = {"model_type": "mlp_speculator", "emb_dim": H, "inner_dim": INNER, "n_predict": 4, "vocab_size": VOCAB}
    config, w = {
        "speculators": (speculators_config(), eagle3_tensors()),
        "flat": (FLAT, midlayer(eagle3_tensors())),
        "eagle1": ({k: v for k, v in FLAT.items() if k != "draft_vocab_size"}, eagle1_tensors(True)),
        "mtp": (MTP, mtp_tensors()),
        "medusa": ({"medusa_num_heads": 3, "medusa_num_layers": 1}, medusa_tensors(3, 1)),
        "mlp": (mlp, mlp_tensors(4, False)),
    }[dialect]
    forbid_reading(monkeypatch)
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path, config, w), **changed)


def test_too_few_layers_are_refused_unread(tmp_path: Path, monkeypatch):
    forbid_reading(monkeypatch)
    write(tmp_path / "a", speculators_config(), eagle3_tensors())
    with pytest.raises(ModelError, match=r"behind layers \[1, 4, 7\], and org/Tiny-Target has 6 layers"):
        load(tmp_path / "a", num_layers=6)
    config = FLAT | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}
    write(tmp_path / "b", config, midlayer(eagle3_tensors()))
    with pytest.raises(ModelError, match=r"behind layers \[2, 4, 7\]"):
        load(tmp_path / "b", num_layers=6)
    write(tmp_path / "c", MTP, mtp_tensors())
    with pytest.raises(ModelError, match=r"number of layers of 9, and org/Tiny-Target has 8"):
        load(tmp_path / "c", num_layers=8)


CONFIGS = [
    ({"speculators_model_type": "dflash"}, "speculator of type 'dflash'"),
    ({"transformer_layer_config": LLAMA | {"model_type": "gemma3_text"}}, "layers of type 'gemma3_text'"),
    ({"transformer_layer_config": LLAMA | {"hidden_act": "gelu"}}, "activation 'gelu'"),
    ({"transformer_layer_config": LLAMA | {"num_key_value_heads": 3}}, "no transformer layer can have"),
    ({"transformer_layer_config": LLAMA | {"hidden_size": "wide"}}, "transformers refuses"),
    ({"transformer_layer_config": LLAMA | {"partial_rotary_factor": 0.5}}, "rotates a part of each head only"),
    (
        {
            "transformer_layer_config": LLAMA
            | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
        },
        "rotates a part of each head only",
    ),
    ({"transformer_layer_config": "llama"}, "transformer_layer_config in its config.json that is no JSON object"),
    ({"speculators_config": ["greedy"]}, "speculators_config in its config.json that is no JSON object"),
    ({"eagle_aux_hidden_state_layer_ids": "1,4,7"}, "no list of numbers"),
    ({"eagle_aux_hidden_state_layer_ids": [-1, 4, 7]}, r"behind layers \[-1, 4, 7\]"),
    ({"draft_vocab_size": VOCAB + 1}, f"draft_vocab_size of {VOCAB + 1}"),
    ({"draft_vocab_size": "many"}, "draft_vocab_size of 'many'"),
]


@pytest.mark.parametrize("changed, message", CONFIGS, ids=[m for _, m in CONFIGS])
def test_configs_that_are_refused(tmp_path: Path, changed: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message) as caught:
        load(write(tmp_path, speculators_config() | changed, eagle3_tensors()))
    assert "\n" not in str(caught.value)


def test_sliding_attention_is_refused(tmp_path: Path):
    inner = {"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 8}
    with pytest.raises(ModelError, match="sliding attention"):
        load(write(tmp_path, speculators_config(**inner), eagle3_tensors(kind="qwen3")))


def test_one_hidden_state_is_refused(tmp_path: Path):
    config = FLAT | {"eagle_config": {"use_aux_hidden_state": False}}
    with pytest.raises(ModelError, match="use_aux_hidden_state is false"):
        load(write(tmp_path, config, midlayer(eagle3_tensors())))


@pytest.mark.parametrize(
    "maps",
    [
        torch.arange(DRAFT) * 3,  # tokens instead of offsets
        torch.full((DRAFT,), -1),
        -torch.arange(DRAFT),  # all the same token
    ],
)
def test_d2t_has_to_lead_somewhere(tmp_path: Path, maps: torch.Tensor):
    w = eagle3_tensors() | {"d2t": maps}
    with pytest.raises(ModelError, match=r"'d2t' does not lead to 12 different tokens below 40"):
        load(write(tmp_path, speculators_config(), w))


def test_d2t_of_another_type(tmp_path: Path):
    w = eagle3_tensors() | {"d2t": torch.zeros(DRAFT)}
    with pytest.raises(ModelError, match="'d2t' should hold whole numbers"):
        load(write(tmp_path, speculators_config(), w))


def test_unknown_folders(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path / "nowhere")
    target = prefixed("model.layers.0.", layer_tensors(H))
    with pytest.raises(ModelError, match=r"no head that Headstart knows.*'model\.layers\.0\.input_layernorm\.weight'"):
        load(write(tmp_path / "a", LLAMA, target))
    with pytest.raises(ModelError, match="Qwen's or MiMo's naming"):
        load(write(tmp_path / "b", LLAMA, {"mtp.fc.weight": random(H, 2 * H)}))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps(FLAT))
    with pytest.raises(ModelError, match="holds no weights of a head"):
        load(tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load(tmp_path / "c")


class Trap:
    """Would run code when unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("/nonexistent/trap"),))


@pytest.mark.parametrize("old", [False, True])
def test_pickles_that_are_more_than_tensors(tmp_path: Path, old: bool):
    write(tmp_path, FLAT, {})
    (tmp_path / "model.safetensors").unlink()
    path, zipped = tmp_path / "pytorch_model.bin", not old
    torch.save({"fc.weight": Trap()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match="could run code"):
        load(tmp_path)
    torch.save([1, 2], path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match="should hold a dict from names to tensors"):
        load(tmp_path)
    torch.save({"epoch": 3}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match="the entry 'epoch' is no plain tensor"):
        load(tmp_path)


def test_pickles_of_old_torch_are_read(tmp_path: Path):
    w = midlayer(eagle3_tensors())
    write(tmp_path, FLAT, w, "pytorch_model.bin")
    torch.save(w, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    head = load(tmp_path)
    same(run(head), eagle3_reference(w, features(head), Eagle3Flags()))


def test_a_tensor_in_two_files(tmp_path: Path):
    write(tmp_path, speculators_config(), eagle3_tensors())
    save_file({"fc.weight": random(H, 3 * H)}, tmp_path / "more.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'fc\.weight' twice, in model\.safetensors and more\.safetensors"):
        load(tmp_path)
