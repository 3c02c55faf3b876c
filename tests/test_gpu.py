"""What only a GPU can show: graphs, bfloat16, early launches, and the same bits for a row whoever its neighbours are.

HEADSTART_TEST_DEVICE=cuda python -m pytest tests/test_gpu.py tests/test_engine.py tests/test_architectures.py
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from headstart.core import Batch, Choice, Request, Segment
from headstart.errors import ConfigError
from headstart.models import packing
from headstart.models.attention import _eager, segment_mask
from headstart.models.packing import trace
from headstart.models.runner import TorchRunner

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from headstart.models.kernel_runner import KernelRunner
from headstart.models.kernels.attention import Room
from headstart.models.paged import PagedContext
from tests import harness, tiny

pytestmark = pytest.mark.gpu
PAGE = 16
CHAIN = {"method": "draft_model", "num_speculative_tokens": 3}
SMALL = dict(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, vocab_size=5000,
)  # fmt: skip


def small_model(kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL, max_position_embeddings=2048)
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype).eval()


def a_batch(sizes: list[tuple[int, int, bool]], seed: int = 0) -> Batch:
    """Requests of (context, new tokens, tree), with pages in no order."""
    rng, segments, positions, start = np.random.default_rng(seed), [], [], 0
    pages = iter(np.random.default_rng(1).permutation(400).tolist())
    for context, new, tree in sizes:
        own = np.array([next(pages) for _ in range(-(-(context + new) // PAGE))])
        slots = (own[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[: context + new]
        parents = np.array([-1, *(int(rng.integers(0, i)) for i in range(1, new))]) if tree else None
        depth = [len(p) - 1 for p in trace(parents)[1]] if parents is not None else range(new)
        segments.append(Segment(start, start + new, context, slots, parents))
        positions += [context + d for d in depth]
        start += new
    rows = np.arange(start)
    tokens = np.random.default_rng(2).integers(0, 5000, start)
    return Batch(tokens, np.array(positions), segments, rows, choice=Choice.of(start, len(sizes)))


@torch.inference_mode()
def filled(runner: TorchRunner) -> TorchRunner:
    runner.allocate(400 * PAGE, PAGE, 512, 64)
    for i, pool in enumerate((*runner.keys, *runner.values)):
        generator = torch.Generator().manual_seed(i)
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return runner


MIXES = [
    [(100, 1, False)],
    [(300, 8, True)],
    [(500, 64, True)],
    [(40, 1, False)] * 20,
    [(0, 200, False), (90, 5, True)],
]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_fused_and_unfused_agree_within_the_rounding_of_bfloat16(kind: str, mix: list[tuple[int, int, bool]]) -> None:
    """Against the same weights in float32, fusing may not err noticeably more than the model's own forward does."""
    model, batch = small_model(kind), a_batch(mix)
    exact = filled(TorchRunner(copy.deepcopy(model).float(), fuse=False)).forward(batch).logits
    own = filled(KernelRunner(copy.deepcopy(model), fuse=False)).forward(batch).logits.float()
    fused = filled(KernelRunner(model)).forward(batch).logits.float()
    scale = exact.std()
    assert (fused - exact).std() / scale < 1.3 * (own - exact).std() / scale + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv", "dim"), [(32, 8, 128), (12, 2, 128), (9, 3, 64), (8, 4, 256)])
@pytest.mark.parametrize("special", [{}, {"window": 200}, {"softcap": 20.0}, {"sinks": True}], ids=str)
def test_attention_against_float64(dtype: torch.dtype, heads: int, kv: int, dim: int, special: dict) -> None:
    """Plain rows, a tree, a prefill piece and all of them together, rowwise too, to the rounding of the type."""
    options = dict(special)
    sinks = torch.randn(heads, device="cuda") if options.pop("sinks", False) else None
    runner = KernelRunner(small_model())
    keys, values = (torch.randn(400 * PAGE, kv, dim, device="cuda").to(dtype) for _ in range(2))
    for mix in (
        [(700, 1, False), (3, 1, False)],
        [(900, 8, True)],
        [(1000, 64, True), (0, 100, False), (33, 1, False)],
    ):
        batch = a_batch(mix)
        shape = packing.Shape.of(batch)
        block = np.zeros(packing.size_of(shape, batch, PAGE), np.int32)
        packing.fill(block, shape, batch, PAGE)
        layout = packing.layout(torch.from_numpy(block).cuda(), shape, PAGE)
        query = torch.randn(shape.rows, heads, dim, device="cuda").to(dtype)
        for deterministic in (False, True):
            rows = max(16, 1 << (heads // kv - 1).bit_length())
            room = Room(64 * kv * 16, rows if deterministic else 64, dim, torch.device("cuda"))
            context = PagedContext(layout, [keys], [values], room, runner.limits, deterministic, query, query, query)
            got = context.read(0, query, dim**-0.5, options.get("window"), options.get("softcap"), sinks)
            for s in batch.segments:
                mask = torch.from_numpy(segment_mask(s, options.get("window"))).cuda()[None, None]
                q, k, v = (
                    x.double().transpose(0, 1)[None] for x in (query[s.start : s.stop], keys[s.slots], values[s.slots])
                )
                want = _eager(q, k, v, mask, dim**-0.5, options.get("softcap"), sinks)[0].transpose(0, 1)
                error = (got[s.start : s.stop].double() - want).abs().max()
                assert error < {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-5}[dtype]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_a_graph_computes_what_its_launches_compute(mix: list[tuple[int, int, bool]]) -> None:
    model, batch = small_model(), a_batch(mix)
    with_graph, without = filled(KernelRunner(model)), filled(KernelRunner(model, graphs=False))
    a = [with_graph.forward(batch).logits.clone() for _ in range(3)]
    assert torch.equal(a[0], a[1]) and torch.equal(a[1], a[2])
    torch.testing.assert_close(a[0], without.forward(batch).logits, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deterministic_rows_have_the_same_bits_in_every_company(kind: str, dtype: torch.dtype) -> None:
    """One request alone, and the same among others: its logits are equal bit by bit."""
    runner = filled(KernelRunner(small_model(kind, dtype), deterministic=True))
    first, others = (333, 7, True), [(20, 1, False), (64, 30, True), (700, 1, False), (0, 150, False)]
    alone = runner.forward(a_batch([first])).logits.clone()
    for count in range(1, len(others) + 1):
        batch = a_batch([first, *others[:count]])
        assert torch.equal(runner.forward(batch).logits[: len(alone)], alone)


def test_float16_takes_the_library_products_and_is_not_offered_deterministic() -> None:
    """x · gain may leave the range of float16 before it is divided by its size."""
    model = small_model(dtype=torch.float16)
    for layer in model.model.layers:
        layer.input_layernorm.weight.data.fill_(20.0)
    model.model.embed_tokens.weight.data.mul_(1e5)
    batch = a_batch([(30, 3, False)])
    assert filled(KernelRunner(model)).forward(batch).logits.isfinite().all()
    with pytest.raises(ConfigError, match="float16"):
        KernelRunner(small_model(dtype=torch.float16), deterministic=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_model_may_live_on_another_device_than_the_current_one() -> None:
    model = small_model().to("cuda:1")
    batch = a_batch([(30, 3, False)])
    want = filled(TorchRunner(copy.deepcopy(model).float(), fuse=False)).forward(batch).logits
    assert (filled(KernelRunner(model)).forward(batch).logits - want).abs().max() < 0.2


def test_deterministic_drafted_and_plain_have_the_same_bits() -> None:
    """A chain verified in one forward, and the same tokens one after the other."""
    runner = filled(KernelRunner(small_model(), deterministic=True))
    whole = a_batch([(333, 9, False)])
    together = runner.forward(whole).logits.clone()
    segment = whole.segments[0]
    for i in range(9):
        one = Batch(
            whole.tokens[i : i + 1], whole.positions[i : i + 1],
            [Segment(0, 1, segment.context + i, segment.slots[: segment.context + i + 1])], np.arange(1),
        )  # fmt: skip
        assert torch.equal(runner.forward(one).logits[0], together[i])


@pytest.mark.parametrize("spec", [None, {"method": "ngram", "prompt_lookup_min": 1}, CHAIN], ids=str)
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}], ids=str
)
def test_nothing_waits_for_the_device_but_the_verdicts(spec: dict | None, params: dict) -> None:
    """torch raises where an operation makes the host wait; only an event that is waited for by name is allowed."""
    draft = small_model() if spec is CHAIN else None
    e = harness.engine(small_model(), spec, draft, max_batch_tokens=512)
    prompts = [[(7 * i + j) % 900 for j in range(40)] for i in range(3)]
    for _ in range(5):  # captures its graphs
        harness.run(e, [harness.request(p, **params) for p in prompts])
    asked = [harness.request(p, **params) for p in prompts]
    for r in asked:
        e.add(r)
    torch.cuda.set_sync_debug_mode("error")
    try:
        while not e.idle:
            e.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(r.finish_reason for r in asked)


HEAD = {"method": "eagle3", "num_speculative_tokens": 4}
BUSHY = HEAD | {"tree": True, "num_draft_nodes": 15, "top_k": 8, "max_branches": 8, "p_split": 0.0}


@pytest.mark.parametrize("spec", [HEAD, BUSHY], ids=["chain", "tree"])
@pytest.mark.parametrize(("normed", "temperature"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_a_head_drafts_on_the_device_what_it_drafts_on_the_host(spec: dict, normed: bool, temperature: float) -> None:
    """In float32, one request after the other on the host, all together on the device; ties of rounding may fall anywhere."""
    model = small_model(dtype=torch.float32)
    prompts = [[(7 * i + j) % 900 for j in range(40 + i)] for i in range(5)]

    def requests(max_tokens: int) -> list[Request]:
        return [
            harness.request(p, None, i, temperature=temperature, max_tokens=max_tokens) for i, p in enumerate(prompts)
        ]

    plain = harness.run(harness.engine(TorchRunner(model)), requests(24))
    liked = sorted({t for text in plain for t in text})
    found = []
    for runner, tokens in ((TorchRunner(model), 32), (KernelRunner(model), 24)):  # at its end the host drafts less
        head = tiny.eagle(model.config, (1, 2, 4), liked, head_dim=64, norm_output=normed, norm_before_residual=normed)
        e = harness.engine(runner, spec, head=head.to("cuda"), max_batch_tokens=512)
        drafts = harness.Drafts(e)
        assert [text[:24] for text in harness.run(e, requests(tokens))] == plain
        found.append({text: draft for text, draft in drafts.found.items() if draft[0]})
    host, device = found
    both = [text for text in device if text in host and len(host[text][0]) == len(device[text][0])]
    same = sum(host[text] == device[text] for text in both)
    assert drafts.ahead > 5 and len(both) > 20 and same >= 0.95 * len(both), f"{same} of {len(both)}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_behind_steps_give_the_same_text(temperature: float) -> None:
    """Plain decoding chains steps on placeholders; stop tokens and limits end requests in mid-flight."""
    prompts = tiny.prompts(6)
    texts = []
    for runner in (KernelRunner(tiny.model("llama")), TorchRunner(tiny.model("llama"))):
        asked = [harness.request(p, temperature=temperature, max_tokens=10 + 7 * i) for i, p in enumerate(prompts)]
        texts.append(harness.run(harness.engine(runner), asked, arrivals=3))
        assert all(t >= 0 for r in asked for t in r.tokens)
    assert texts[0] == texts[1]
