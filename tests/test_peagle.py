"""P-EAGLE: heads written as their projects write them, against a forward in plain torch; in the engine, the text never changes.

The reference reads a whole text with its blanks under an explicit mask, from the file's own tensors: what vLLM's parallel
drafting and speculators' training say of depths beyond the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.errors import ConfigError, ModelError
from headstart.models.heads.eagle import Eagle3Flags
from headstart.models.heads.load import TargetFacts, load_head
from headstart.models.heads.peagle import PEagleHead
from tests import tiny
from tests.harness import engine, generate, request, run
from tests.test_head_drafter import asked, plain_texts, watched
from tests.test_heads import (
    DIM,
    EMBEDDING,
    FLAT,
    HEADS,
    INTER,
    KV,
    TEXT,
    VOCAB,
    H,
    Lists,
    Tensors,
    eagle3_tensors,
    features,
    layer,
    load,
    midlayer,
    random,
    rms,
    speculators_config,
    under,
    write,
)

MASK, LEVELS = 9, 4


# ------------------------------------------------------------------ the reference
def reference(
    w: Tensors, features: torch.Tensor, tokens: torch.Tensor, flags: Eagle3Flags, mask: int, levels: int
) -> torch.Tensor:
    """(levels, draft vocabulary): logits behind the last token, from the file's tensors and the target's features."""
    w = {n.replace("midlayer.", "layers.0."): t.to(features.dtype) for n, t in w.items()}
    blanks = w["mask_hidden"].reshape(1, -1).repeat(levels - 1, 1)
    x, ids = torch.cat([features, blanks]), torch.cat([tokens, torch.full((levels - 1,), mask)])
    if flags.norm_before_fc:
        x = rms(x, w["input_norm.weight"])
    if flags.fc_norm:
        size = x.shape[1] // 3
        x = torch.cat([rms(x[:, i * size : (i + 1) * size], w[f"fc_norm.{i}.weight"]) for i in range(3)], -1)
    x = x @ w["fc.weight"].T
    first = under(w, "layers.0.")
    normed = rms(x, first["hidden_norm.weight"])
    read = torch.cat([rms(w["embed_tokens.weight"][ids], first["input_layernorm.weight"]), normed], -1)
    x = layer(normed if flags.norm_before_residual else x, read, first, 10000.0, 1.0)
    index = 1
    while more := under(w, f"layers.{index}."):
        x = layer(x, rms(x, more["input_layernorm.weight"]), more, 10000.0, 1.0)
        index += 1
    return rms(x, w["norm.weight"])[-levels:] @ w["lm_head.weight"].T


@torch.inference_mode()
def drafted(head: Any, levels: int = LEVELS) -> torch.Tensor:
    """Logits of all levels from one `advance`, as a drafter asks for them."""
    blank, count = head.blank, len(TEXT) - 1
    read = torch.cat([features(head), blank.features.expand(levels - 1, -1)])
    tokens = torch.cat([TEXT[1:], torch.full((levels - 1,), blank.token)])
    state = head.advance(0, head.begin(read), tokens, torch.arange(count + levels - 1), Lists())
    return head.logits(0, state[-levels:])


def config(flags: Eagle3Flags = Eagle3Flags(), **inner: Any) -> dict[str, Any]:
    """As speculators' PEagleSpeculatorConfig writes it."""
    made = speculators_config(flags, **inner)
    made |= {"architectures": ["PEagleDraftModel"], "auto_map": {"": "config.PEagleSpeculatorConfig"}}
    made |= {"speculators_model_type": "peagle", "mask_token_id": MASK, "embed_requires_grad": True}
    made["speculators_config"] |= {"algorithm": "peagle"}
    return made


def tensors(*args: Any, dims: int = 3, **more: Any) -> Tensors:
    return eagle3_tensors(*args, **more) | {"mask_hidden": random(*(1,) * (dims - 1), 3 * H)}


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    assert float(wanted.std()) > 0.05 and float((wanted[1:] - wanted[:1]).abs().max()) > 0.05


# ------------------------------------------------------------------ checkpoints
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "flags",
    [Eagle3Flags(), Eagle3Flags(True), Eagle3Flags(norm_before_fc=True), Eagle3Flags(fc_norm=True, norm_output=True)],
    ids=str,
)
def test_speculators_writes_it(tmp_path: Path, kind: str, flags: Eagle3Flags, capsys) -> None:
    w = tensors(flags, layers=2, kind=kind)
    head = load(write(tmp_path, config(flags, model_type=kind, num_hidden_layers=2), w))
    assert isinstance(head, PEagleHead) and head.flags == flags and head.mask_hidden.shape == (1, 1, 3 * H)
    assert (head.spec.kind, head.spec.taps, head.spec.dialect) == ("peagle", (1, 4, 7), "speculators")
    same(drafted(head), reference(w, features(head), TEXT[1:], flags, MASK, LEVELS))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("key", ["ptd_token_id", "pard_token", "mask_token_id"])
def test_aws_and_others_write_it_flat(tmp_path: Path, key: str) -> None:
    """A midlayer, ordinary layers from number 1 on, and a plain Llama config with the mask token under one of three names."""
    w = tensors(layers=3, dims=2)
    flat = FLAT | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 3, key: MASK}
    head = load(write(tmp_path, flat, midlayer(w)))
    assert (head.spec.kind, head.spec.taps, head.mask_hidden.shape) == ("peagle", (2, 4, 6), (1, 3 * H))
    same(drafted(head), reference(w, features(head), TEXT[1:], Eagle3Flags(), MASK, LEVELS))


def test_of_several_names_the_first_is_taken(tmp_path: Path) -> None:
    flat = FLAT | {"ptd_token_id": 3, "mask_token_id": None, "pard_token": MASK}
    assert load(write(tmp_path, flat, midlayer(tensors()))).blank.token == MASK


def test_what_a_config_leaves_out_is_false_for_everybody(tmp_path: Path, capsys) -> None:
    short = {n: v for n, v in config().items() if n != "norm_before_residual"}
    assert not load(write(tmp_path, short, tensors())).flags.norm_before_residual
    assert capsys.readouterr().err == ""


def test_embeddings_may_be_the_targets(tmp_path: Path) -> None:
    w = tensors()
    del w["embed_tokens.weight"]
    head = load(write(tmp_path, config(), w))
    wanted = reference(w | {"embed_tokens.weight": EMBEDDING}, features(head), TEXT[1:], Eagle3Flags(), MASK, LEVELS)
    same(drafted(head), wanted)


@pytest.mark.parametrize("name", ["mask_hidden", "fc.weight", "layers.0.hidden_norm.weight", "d2t"])
@pytest.mark.parametrize("flat", [False, True])
def test_each_tensor_is_needed(tmp_path: Path, name: str, flat: bool) -> None:
    w = tensors()
    del w[name]
    own = FLAT | {"architectures": ["PEagleDraftModel"], "ptd_token_id": MASK} if flat else config()
    with pytest.raises(ModelError, match=name.replace("layers.0.", "")):
        load(write(tmp_path, own, midlayer(w) if flat else w))


def test_a_tensor_without_a_place(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'mask_embed\.weight' that its config\.json leaves no place for"):
        load(write(tmp_path / "a", config(), tensors() | {"mask_embed.weight": random(H)}))
    with pytest.raises(ModelError, match="'mask_hidden' that its config"):
        load(write(tmp_path / "b", speculators_config(), tensors()))


@pytest.mark.parametrize("shape", [(3 * H,), (1, 2 * H), (1, 1, H), (2, 1, 3 * H), (1, 1, 1, 3 * H)], ids=str)
def test_the_state_of_a_blank_has_a_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"'mask_hidden' of shape .* where \[1.*48\] is needed"):
        load(write(tmp_path, config(), tensors() | {"mask_hidden": torch.zeros(shape)}))


@pytest.mark.parametrize(
    ("token", "message"),
    [(None, "without the number of its mask token"), (VOCAB, "mask_token_id of 40"), (-1, "of -1"), ("9", "of '9'")],
)
def test_the_mask_token_is_one_of_the_vocabulary(tmp_path: Path, token: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path, config() | {"mask_token_id": token}, tensors()))


def test_sizes_are_checked_before_weights_are_read(tmp_path: Path, monkeypatch) -> None:
    folder = write(tmp_path, config(), tensors())
    monkeypatch.setattr("headstart.models.heads.load.read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match="hidden size"):
        load(folder, hidden_size=2 * H)
    with pytest.raises(ModelError, match="vocabulary"):
        load(folder, vocab_size=VOCAB + 1)


# ------------------------------------------------------------------ in the engine
CHAIN = {"method": "peagle", "num_speculative_tokens": 4}
TREE = CHAIN | {"tree": True, "num_draft_nodes": 9, "top_k": 3, "max_branches": 3, "p_split": 0.0}
WIDTH = 48  # of the tiny target


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Tensors]:
    """A head for the tiny target in speculators' format, and its tensors."""
    g = torch.Generator().manual_seed(11)

    def loud(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.3 + (len(shape) == 1)

    q = {"q_proj": HEADS * DIM, "k_proj": KV * DIM, "v_proj": KV * DIM}
    w = {
        "embed_tokens.weight": loud(tiny.VOCAB, WIDTH),
        "fc.weight": loud(WIDTH, 3 * WIDTH),
        "norm.weight": loud(WIDTH),
    }
    w |= {"lm_head.weight": loud(90, WIDTH), "layers.0.hidden_norm.weight": loud(WIDTH)}
    for i in range(2):
        own = {f"self_attn.{n}.weight": loud(size, WIDTH if i else 2 * WIDTH) for n, size in q.items()}
        own |= {"self_attn.o_proj.weight": loud(WIDTH, HEADS * DIM), "mlp.gate_proj.weight": loud(INTER, WIDTH)}
        own |= {"mlp.up_proj.weight": loud(INTER, WIDTH), "mlp.down_proj.weight": loud(WIDTH, INTER)}
        own |= {f"{n}_layernorm.weight": loud(WIDTH) for n in ("input", "post_attention")}
        w |= {f"layers.{i}.{n}": t for n, t in own.items()}
    chosen = torch.randperm(tiny.VOCAB, generator=g)[:90].sort().values
    w |= {"d2t": chosen - torch.arange(90), "mask_hidden": loud(1, 1, 3 * WIDTH)}
    sizes = {"hidden_size": WIDTH, "vocab_size": tiny.VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512}
    own = config(draft=90, **sizes) | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    return write(tmp_path_factory.mktemp("peagle"), own, w), w


def head_of(made: tuple[Path, Tensors]) -> Any:
    model = tiny.model()
    facts = TargetFacts.of("org/tiny-target", model)
    return load_head(made[0], facts, model.device, torch.float32)


@torch.inference_mode()
def expected(w: Tensors, model: Any, tokens: list[int], depth: int) -> list[int]:
    """The likeliest token of each level, from one plain forward of the target over all of the text."""
    hidden = model(torch.tensor([tokens[:-1]], device=model.device), output_hidden_states=True).hidden_states
    read = torch.cat([hidden[t][0] for t in (1, 2, 3)], -1).cpu().double()
    best = reference(w, read, torch.tensor(tokens[1:]), Eagle3Flags(), MASK, depth).argmax(-1)
    return (best + w["d2t"][best]).tolist()


@pytest.mark.parametrize("pages", [200, 14])
def test_a_chain_is_that_of_the_whole_text(made, pages: int) -> None:
    """Read in pieces, beside others, after a long prompt that was read at once; and again after a preemption."""
    rs = [*asked(4), *([request(tiny.prompts(1)[0] * 5, max_tokens=12)] if pages > 14 else [])]
    e = engine(tiny.model(), CHAIN, head=head_of(made), share_prefixes=False, pages=pages, max_len=pages // 10 * 50)
    seen = watched(e)
    assert run(e, rs, arrivals=int(pages > 14)) == plain_texts(rs)
    seen = [(tokens, draft) for tokens, draft in seen if len(draft)]
    assert len(seen) > 20 and {len(t) for _, t in seen} >= {4}
    assert (sum(r.stats.preemptions for r in rs) > 0) == (pages == 14)
    for tokens, draft in seen[::3]:
        assert draft.tokens == expected(made[1], tiny.model(), tokens, len(draft)), len(tokens)


def test_all_levels_take_one_forward(made) -> None:
    head, calls = head_of(made), []
    advance = head.advance
    head.advance = lambda level, *rest: (calls.append(len(rest[0])), advance(level, *rest))[1]
    e = engine(tiny.model(), TREE, head=head)
    seen, r = watched(e), request(tiny.prompts(1)[0], max_tokens=10)
    run(e, [r])
    drafts = [t for _, t in seen if len(t)]
    assert (
        len(calls) <= len(drafts) + 1
        and max(len(t) for t in drafts) == 9
        and any(t.parents.count(-1) > 1 for t in drafts)
    )


def test_a_tree_holds_the_best_of_each_level(made) -> None:
    """The likeliest path is that of the chain, and all children of one level are among the same few tokens."""
    e = engine(tiny.model(), TREE, head=head_of(made), share_prefixes=False)
    seen, rs = watched(e), asked(3)
    assert run(e, rs) == plain_texts(rs)
    for tokens, draft in seen[::2]:
        first = [t for t, p in zip(draft.tokens, draft.parents, strict=True) if p == -1]
        second = {t for t, p in zip(draft.tokens, draft.parents, strict=True) if p >= 0 and draft.parents[p] == -1}
        if len(draft) == 9:
            best = expected(made[1], tiny.model(), tokens, 2)
            assert first[0] == best[0] and best[1] in second and len(second) <= 3


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("count", [1, 5])
def test_greedy_text_is_that_of_transformers(made, spec: dict, count: int) -> None:
    rs = asked(count)
    found = run(engine(tiny.model(), spec, head=head_of(made)), rs)
    assert found == [generate(tiny.model(), r.prompt, 12) for r in rs]
    assert all(r.stats.drafted for r in rs if r.stats.steps > 1)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_sampled_text_is_that_of_plain_sampling(made, spec: dict) -> None:
    rs = asked(5, temperature=0.9, top_p=0.95)
    assert run(engine(tiny.model(), spec, head=head_of(made)), rs, arrivals=2) == plain_texts(rs)
    assert sum(r.stats.drafted for r in rs)


def test_rejection_draws_from_each_level(made, capsys) -> None:
    rs = asked(3, temperature=1.0)
    run(engine(tiny.model(), TREE | {"verification": "rejection"}, head=head_of(made)), rs)
    assert sum(r.stats.drafted for r in rs) and "without drafts" not in capsys.readouterr().err


def test_from_a_folder_by_vllms_words(made, tmp_path, capsys) -> None:
    """The head of a target in a folder; vLLM says eagle3 and parallel_drafting. As plain EAGLE-3 it is not run."""
    from typer.testing import CliRunner

    from headstart import LLM, SamplingParams
    from headstart.cli import app

    target = tmp_path / "target"
    tiny.model().save_pretrained(target)
    tiny.tokenizer().save_pretrained(target)
    params, prompt = SamplingParams(temperature=0, max_tokens=10), tiny.prompts(1)[0]
    spec = {"method": "eagle3", "model": str(made[0]), "num_speculative_tokens": 3, "parallel_drafting": True}
    with LLM(str(target), speculative=spec, device="cpu", dtype="float32") as llm:
        out = llm.generate([prompt], params)[0]
        assert llm.engine.drafting.drafters["peagle"].describe() == "peagle head, chains"
    assert out.token_ids == generate(tiny.model(), prompt, 10)[: len(out.token_ids)] and out.stats.drafted > 0
    with pytest.raises(ConfigError, match="use method 'peagle'"):
        LLM(str(target), speculative=spec | {"parallel_drafting": False}, device="cpu")
    wrong = CliRunner().invoke(app, ["convert", str(made[0]), "--out", str(tmp_path / "x"), "--target", str(target)])
    assert wrong.exit_code == 2 and "'peagle'" in wrong.output
