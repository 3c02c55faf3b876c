"""From a name to a model: what loads, what is chosen, and what is refused with one clear sentence."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart import LLM, ConfigError, ModelError, SamplingParams
from headstart.models import load as loading
from headstart.models.runner import TorchRunner
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("models") / "tiny")


def edited(folder, tmp_path, **changes):
    """A copy of the folder with another config."""
    out = tmp_path / "edited"
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_a_folder_by_path_and_by_text(folder) -> None:
    a, b = loading.load(folder), loading.load(str(folder))
    assert a.vocab_size == b.vocab_size and a.max_len == 512 and a.eos_ids == {0}


def test_rope_that_depends_on_the_batch_is_bounded(folder, tmp_path, capsys) -> None:
    """dynamic RoPE changes all angles of a call beyond the original length: requests must stay within it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    made = loading.load(edited(folder, tmp_path, rope_parameters=rope))
    assert made.max_len == 128 and "depends on the batch" in capsys.readouterr().err


def test_a_model_with_a_mask_of_its_own_is_refused() -> None:
    made = tiny.model()
    attention = made.model.layers[0].self_attn
    original = attention.forward

    def masked(hidden_states, attention_mask=None, **more):
        return original(hidden_states, attention_mask=torch.ones(1, 1, 1, 1), **more)

    attention.forward = masked
    with pytest.raises(ModelError, match="a mask of its own"):
        TorchRunner(made)


def test_every_eos_id_counts(folder, tmp_path) -> None:
    out = edited(folder, tmp_path)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    made = loading.load(out)
    assert made.eos_ids == {0, 7, 9}


def test_dtype_and_device(folder) -> None:
    assert loading.load(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    assert loading.pick_dtype("auto", torch.device("cpu")) in (torch.float32, torch.bfloat16)
    with pytest.raises(ConfigError, match="Did you mean 'float16'"):
        loading.load(folder, dtype="flot16")
    with pytest.raises(ConfigError, match="is not a device"):
        loading.load(folder, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            loading.load(folder, device="cuda")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_half_precision_gives_the_same_text_with_and_without_drafts(folder) -> None:
    """bfloat16 end to end: near-ties may swap, so compare against the engine's own plain decoding and allow few."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(folder, dtype="bfloat16", speculative="ngram", kv_memory=1 << 22) as llm:
        texts = ["the quick brown fox the quick brown", "a stone bridge over", "numbers like 1 2 3 and 1 2"]
        drafted = [o.token_ids for o in llm.generate(texts, params)]
        plain = [o.token_ids for o in llm.generate(texts, params, speculative=False)]
    assert sum(a == b for a, b in zip(drafted, plain, strict=True)) >= 2


def test_max_model_len(folder) -> None:
    assert loading.load(folder, max_len=100).max_len == 100
    with pytest.raises(ConfigError, match="at most 512 positions"):
        loading.load(folder, max_len=1000)


@pytest.mark.parametrize("name", ["/no/such/model", "no-such-model", "./nothing", "a/b/c"])
def test_what_is_nowhere(name) -> None:
    with pytest.raises(ModelError, match="There is no model"):
        loading.load(name)


def test_a_hub_id_that_is_not_cached_offline(monkeypatch, tmp_path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="not in the local hub cache and HF_HUB_OFFLINE is set"):
        loading.load("someone/some-model")


def test_a_hub_id_from_the_cache(monkeypatch, folder) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(folder))
    assert loading.load("someone/some-model").max_len == 512


def test_missing_tensors_never_run_as_noise(folder, tmp_path) -> None:
    out = edited(folder, tmp_path)
    tensors = load_file(out / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        loading.load(out)


def test_recurrent_layers_are_refused_before_loading(folder, tmp_path) -> None:
    out = edited(folder, tmp_path, model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match="cannot be rolled back"):
        loading.load(out)


def test_hybrid_layers_are_refused(tmp_path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    with pytest.raises(ModelError, match="linear_attention"):
        loading.refuse_recurrent(config)


def test_layers_without_attention_are_found_by_the_probe() -> None:
    made = tiny.model()
    original = made.model.layers[1].self_attn.forward
    made.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="1 of 3 layers without attention"):
        TorchRunner(made)
    assert original is not None


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_architectures_without_the_attention_interface_are_refused(kind) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"bloom": dict(n_layer=2, n_head=4), "falcon": dict(num_hidden_layers=2, num_attention_heads=4)}[kind]
    config = AutoConfig.for_model(kind, hidden_size=32, vocab_size=64, **sizes)
    with pytest.raises(ModelError, match=r"cannot run (it|here)"):
        TorchRunner(AutoModelForCausalLM.from_config(config))


def test_a_quantised_folder_names_the_package_that_is_missing(folder, tmp_path) -> None:
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    with pytest.raises(ModelError, match=r"(?i)package|install|gptq"):
        loading.load(edited(folder, tmp_path, quantization_config=quantised))


def test_an_unknown_architecture(folder, tmp_path) -> None:
    with pytest.raises(ModelError, match="could not be loaded"):
        loading.load(edited(folder, tmp_path, model_type="never_heard_of"))


def test_a_folder_without_tokenizer(folder, tmp_path) -> None:
    out = edited(folder, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (out / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="no tokenizer"):
        loading.load(out)


def test_a_single_weights_file(folder) -> None:
    with pytest.raises(ModelError, match="name the folder"):
        loading.load(folder / "model.safetensors")


def test_a_file_that_is_no_gguf(tmp_path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nonsense" * 10)
    with pytest.raises(ModelError, match="not a GGUF file"):
        loading.load(tmp_path / "x.gguf")
