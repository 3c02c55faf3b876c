"""The local Ollama store: from a name to a GGUF file, and one clear sentence where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.errors import ModelError
from headstart.models import load as loading
from headstart.models import ollama

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "models"
    (root / "manifests").mkdir(parents=True)
    (root / "blobs").mkdir()
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    return root


def pull(root: Path, name: str, digest: str = DIGEST, kind: str = ollama.WEIGHTS) -> Path:
    """What `ollama pull` leaves behind. Returns the blob."""
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:00"}]
    manifest.write_text(json.dumps({"layers": [*layers, {"mediaType": kind, "digest": digest}]}))
    blob = root / "blobs" / digest.replace(":", "-")
    blob.write_bytes(b"GGUF")
    return blob


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("llama3.2:1b-instruct-q4_K_M", "registry.ollama.ai/library/llama3.2/1b-instruct-q4_K_M"),
        ("someone/model", "registry.ollama.ai/someone/model/latest"),
        ("someone/model:8b", "registry.ollama.ai/someone/model/8b"),
        ("hf.co/someone/model-GGUF:Q8_0", "hf.co/someone/model-GGUF/Q8_0"),
        ("registry.ollama.ai/library/llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
    ],
)
def test_names_as_ollama_takes_them(store: Path, name: str, place: str) -> None:
    for other in ("a/b/c/latest", "registry.ollama.ai/library/other/1b", "registry.ollama.ai/someone/other/8b"):
        pull(store, other, "sha256:" + "cd" * 32)
    blob = pull(store, place)
    assert ollama.find(name) == ollama.find(ollama.PREFIX + name) == blob
    assert loading.gguf_file(f"ollama:{name}") == blob


def test_the_store_lists_what_it_has_as_ollama_does(store: Path) -> None:
    places = ("registry.ollama.ai/library/llama3.2/1b", "registry.ollama.ai/me/mine/latest", "hf.co/a/b/Q8_0")
    for place in places:
        pull(store, place)
    assert sorted(ollama.names(store)) == ["hf.co/a/b:Q8_0", "llama3.2:1b", "me/mine:latest"]
    for name in ollama.names(store):
        assert ollama.find(name).is_file()


def test_a_model_that_is_not_there(store: Path) -> None:
    with pytest.raises(ModelError, match=r"The Ollama store has no llama3\.2:latest\. It is empty\."):
        ollama.find("llama3.2")
    pull(store, "registry.ollama.ai/library/llama3.2/1b")
    with pytest.raises(ModelError, match=r"has no lama3\.2:1b\. Did you mean 'llama3\.2:1b'\?"):
        loading.load("ollama:lama3.2:1b")
    with pytest.raises(ModelError, match=r"has no zzz:latest\. Known: llama3\.2:1b\."):
        ollama.find("zzz")


@pytest.mark.parametrize(
    "name",
    ["", "..", "../../etc/passwd", "a/../b", "../x:1b", "x:../../y", "x:", "a/b/c/d", "a//b", "/etc/passwd", ".hidden",
     "x y", "x:1b/2", "x:1b:2"],
)  # fmt: skip
def test_what_is_no_name_stays_outside(store: Path, name: str) -> None:
    (store / "manifests" / "registry.ollama.ai").mkdir()
    if name == "x:":  # a tag may be left out, colon and all
        pull(store, "registry.ollama.ai/library/x/latest")
        assert ollama.find(name).is_file()
        return
    with pytest.raises(ModelError, match="is not a name in an Ollama store: write ollama:model or ollama:model:tag"):
        ollama.find(f"ollama:{name}")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"layers": 3}', '{"layers": [3]}', '{"layers": [{}]}', '{"layers": []}']
)
def test_a_broken_manifest(store: Path, text: str) -> None:
    pull(store, "registry.ollama.ai/library/x/latest")
    (store / "manifests/registry.ollama.ai/library/x/latest").write_text(text)
    with pytest.raises(ModelError, match=r"latest names no GGUF weights: pull the model again"):
        ollama.find("x")


def test_a_manifest_without_weights_or_with_bytes_that_are_no_text(store: Path) -> None:
    pull(store, "registry.ollama.ai/library/x/latest", kind="application/vnd.ollama.image.adapter")
    with pytest.raises(ModelError, match="names no GGUF weights"):
        ollama.find("x")
    (store / "manifests/registry.ollama.ai/library/x/latest").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match="names no GGUF weights"):
        ollama.find("x")


def test_a_blob_that_is_missing_or_elsewhere(store: Path, tmp_path: Path) -> None:
    pull(store, "registry.ollama.ai/library/x/latest").unlink()
    with pytest.raises(ModelError, match="is missing from the Ollama store: pull the model again"):
        ollama.find("x")
    (tmp_path / "secret").write_text("GGUF")
    for digest in ("../../secret", str(tmp_path / "secret"), "..", ""):
        manifest = {"layers": [{"mediaType": ollama.WEIGHTS, "digest": digest}]}
        (store / "manifests/registry.ollama.ai/library/x/latest").write_text(json.dumps(manifest))
        with pytest.raises(ModelError, match="is missing from the Ollama store"):
            ollama.find("x")


def test_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"no Ollama store in .*nowhere\. Set OLLAMA_MODELS"):
        loading.gguf_file("ollama:llama3.2")
    monkeypatch.delenv("OLLAMA_MODELS")
    places = tuple(str(tmp_path / p) for p in ("one", "two"))
    monkeypatch.setattr(ollama, "PLACES", places)
    with pytest.raises(ModelError, match=r"no Ollama store in .*one or .*two"):
        ollama.store()
    (tmp_path / "two" / "manifests").mkdir(parents=True)
    assert ollama.store() == tmp_path / "two"


def test_other_names_are_not_looked_for_in_the_store(store: Path, tmp_path: Path) -> None:
    assert loading.gguf_file("someone/model") is None
    blob = pull(store, "registry.ollama.ai/library/x/latest")
    assert loading.gguf_file(blob) == blob  # a GGUF file by any name
