"""Model files that are broken, each in its own way: one sentence that names the file, and the tensor where there is one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from headstart.errors import ModelError
from headstart.models import gguf
from headstart.models.files import check_folder, read_json, safetensors_header
from headstart.models.load import resolve

CONFIG = {"model_type": "llama", "vocab_size": 8}
TENSORS = {"embed.weight": torch.zeros(4, 3), "norm.weight": torch.ones(5), "head.weight": torch.zeros(2, 2)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder, in so far as its files can tell."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def complaint(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check_folder(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?", ")"))
    return message


def write_safetensors(path: Path, header: Any, data: bytes = b"", announce: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if announce is None else announce) + raw + data)


# ------------------------------------------------------------------ folders
def test_a_whole_folder_passes(folder: Path):
    assert check_folder(folder) == CONFIG
    assert set(safetensors_header(folder / "model.safetensors")) == set(TENSORS)


def test_no_config(folder: Path):
    (folder / "config.json").unlink()
    assert "has no config.json" in complaint(folder)


@pytest.mark.parametrize("text", ["{", "", '{"a": }', "\x00\x01"])
def test_a_config_that_is_no_json(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    assert "config.json cannot be read as JSON" in complaint(folder)


def test_a_config_that_is_no_text(folder: Path):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "config.json cannot be read as JSON" in complaint(folder)


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null"])
def test_a_config_that_is_no_object(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    assert "should hold a JSON object" in complaint(folder)


def test_a_missing_json_file(tmp_path: Path):
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_json(tmp_path / "nowhere.json")


def test_no_weights(folder: Path):
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in complaint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_only_pickles(folder: Path, name: str):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x02")
    message = complaint(folder)
    assert "pickles" in message and "safetensors" in message


def test_pickles_beside_safetensors_do_not_matter(folder: Path):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    check_folder(folder)


# ------------------------------------------------------------------ shards
def sharded(folder: Path, present: int, count: int = 3) -> None:
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weights = {f"t{i}": name for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    for i, name in enumerate(names[:present]):
        save_file({f"t{i}": torch.zeros(2)}, folder / name)


def test_all_shards(folder: Path):
    sharded(folder, 3)
    check_folder(folder)


@pytest.mark.parametrize(
    ("present", "words"), [(2, "lacks model-00003-of-00003.safetensors of 3"), (1, "and 1 more of 3")]
)
def test_missing_shards_are_named(folder: Path, present: int, words: str):
    sharded(folder, present)
    message = complaint(folder)
    assert words in message and "missing shards" in message


def test_a_damaged_shard_is_named(folder: Path):
    sharded(folder, 3)
    broken = folder / "model-00002-of-00003.safetensors"
    broken.write_bytes(broken.read_bytes()[:-3])
    message = complaint(folder)
    assert broken.name in message and "'t1'" in message


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}', "{}"]
)
def test_an_index_that_says_nothing_useful(folder: Path, index: str):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    complaint(folder)


# ------------------------------------------------------------------ safetensors
@pytest.mark.parametrize("cut", [1, 10, 15])
def test_a_truncated_file_names_the_tensor_that_fails(folder: Path, cut: int):
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    header = safetensors_header(file)
    last = max(header, key=lambda n: header[n]["data_offsets"][1])
    file.write_bytes(raw[:-cut])
    message = complaint(folder)
    assert "truncated" in message and repr(last) in message and "Fetch the file again" in message


@pytest.mark.parametrize("size", [0, 3, 7])
def test_a_file_shorter_than_anything(folder: Path, size: int):
    (folder / "model.safetensors").write_bytes(b"\0" * size)
    assert f"is {size} bytes long, too short" in complaint(folder)


def test_a_header_longer_than_the_file(folder: Path):
    write_safetensors(folder / "model.safetensors", {}, announce=10**12)
    assert "ends inside its header" in complaint(folder)


def test_a_file_cut_inside_its_header(folder: Path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    assert "ends inside its header" in complaint(folder)


@pytest.mark.parametrize("raw", [b"garbage!", b'{"a": ', b"\xff\xfe\xff\xfe", b"", b"<html>404</html>"])
def test_a_garbage_header(folder: Path, raw: bytes):
    write_safetensors(folder / "model.safetensors", raw)
    assert "unreadable safetensors header" in complaint(folder)


@pytest.mark.parametrize("header", [[], 5, "x", None, [1, 2]])
def test_a_header_that_is_no_object(folder: Path, header: Any):
    write_safetensors(folder / "model.safetensors", header)
    message = complaint(folder)
    assert "safetensors header" in message and "Fetch the file again" in message


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    "lie",
    [
        {"data_offsets": [0, 4]}, {"data_offsets": [4, 8]}, {"data_offsets": [8, 0]}, {"data_offsets": [-8, 0]},
        {"shape": [3]}, {"shape": [0]}, {"dtype": "F64"}, {"dtype": "BF16"}, {"shape": [2, -1]},
    ],
)  # fmt: skip
def test_offsets_that_lie(folder: Path, lie: dict[str, Any]):
    write_safetensors(folder / "model.safetensors", {"w": entry(**lie)}, b"\0" * 8)
    message = complaint(folder)
    assert "'w'" in message and "where its shape and type need" in message


@pytest.mark.parametrize(
    "malformed",
    [
        {}, None, 7, [], "x", {"dtype": "F32"}, entry(data_offsets=[0]), entry(data_offsets=None), entry(shape=None),
        entry(shape=["a"]), entry(data_offsets=["0", "8"]), entry(dtype=[1]), entry(data_offsets=[None, None]),
    ],
)  # fmt: skip
def test_entries_that_are_malformed(folder: Path, malformed: Any):
    write_safetensors(folder / "model.safetensors", {"w": malformed}, b"\0" * 8)
    message = complaint(folder)
    assert "'w'" in message and "malformed" in message


def test_a_type_of_a_later_day_is_taken_by_its_offsets(folder: Path):
    write_safetensors(folder / "model.safetensors", {"w": entry(dtype="F4"), "__metadata__": {"a": "b"}}, b"\0" * 8)
    check_folder(folder)
    write_safetensors(folder / "model.safetensors", {"w": entry(dtype="F4")}, b"\0" * 7)
    assert "truncated" in complaint(folder)


# ------------------------------------------------------------------ code of its own
def test_remote_code_is_not_run_unasked(folder: Path):
    config = {"model_type": "brand_new", "auto_map": {"AutoModelForCausalLM": "modeling_new.NewModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    message = complaint(folder)
    assert "modeling_new.NewModel" in message and "trust_remote_code=True" in message
    assert check_folder(folder, trust_remote_code=True) == config


def test_a_known_model_that_also_brings_code_runs_without_it(folder: Path):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModelForCausalLM": "x.Y"}}))
    check_folder(folder)


@pytest.mark.parametrize("auto_map", [{}, [], "x.Y", {"AutoConfig": "x.Y"}])
def test_an_odd_map_is_refused_all_the_same(folder: Path, auto_map: Any):
    (folder / "config.json").write_text(json.dumps({"model_type": "brand_new", "auto_map": auto_map}))
    assert "needs code of its own" in complaint(folder)


# ------------------------------------------------------------------ GGUF
@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), dtype=np.float32))
    writer.add_tensor("output.weight", np.ones((8, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_complaint(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        gguf.check(path)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_a_whole_gguf_passes(gguf_file: Path):
    gguf.check(gguf_file)


def test_the_quick_reader_reads_what_the_other_reads_and_once(gguf_file: Path):
    import gguf as library

    writer = GGUFWriter(str(gguf_file), "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "né", "word " * 50])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    before = library.GGUFReader, library.get_tensor_name_map
    slow = gguf.open_reader(gguf_file)
    with gguf.quickly():
        quick = gguf.open_reader(gguf_file)
        assert gguf.open_reader(gguf_file) is quick
    assert (library.GGUFReader, library.get_tensor_name_map) == before
    assert list(quick.fields) == list(slow.fields)
    assert all(quick.fields[k].contents() == slow.fields[k].contents() for k in slow.fields)
    assert [t.data.tolist() for t in quick.tensors] == [t.data.tolist() for t in slow.tensors] != []


@pytest.mark.parametrize("raw", [b"", b"GGUF", b"PK\x03\x04" + b"\0" * 100, b"<html>" + b" " * 100])
def test_what_is_no_gguf(tmp_path: Path, raw: bytes):
    (tmp_path / "x.gguf").write_bytes(raw)
    assert "is not a GGUF file" in gguf_complaint(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [1, 4, 99])
def test_another_version_of_gguf(gguf_file: Path, version: int):
    raw = gguf_file.read_bytes()
    gguf_file.write_bytes(raw[:4] + struct.pack("<I", version) + raw[8:])
    assert f"GGUF version {version}" in gguf_complaint(gguf_file)


@pytest.mark.parametrize("keep", [24, 60, 0.5, 0.8, -1, -40])
def test_a_truncated_gguf(gguf_file: Path, keep: float):
    raw = gguf_file.read_bytes()
    at = int(len(raw) * keep) if 0 < keep < 1 else int(keep)
    gguf_file.write_bytes(raw[:at])
    message = gguf_complaint(gguf_file)
    assert "truncated" in message and "again" in message


def test_two_gguf_files_have_two_fingerprints(gguf_file: Path):
    first = gguf.fingerprint(gguf_file)
    assert gguf.fingerprint(gguf_file) == first
    raw = bytearray(gguf_file.read_bytes())
    raw[-1] ^= 1
    gguf_file.write_bytes(raw)
    assert gguf.fingerprint(gguf_file) != first


def test_a_folder_with_several_gguf_files_asks_which(gguf_file: Path):
    assert gguf.only_file(gguf_file.parent) == gguf_file
    (gguf_file.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="name the one to load"):
        gguf.only_file(gguf_file.parent)
    assert gguf.only_file(gguf_file.parent.parent / "nowhere") is None


# ------------------------------------------------------------------ names
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm", "Did you mean 'smollm2'?"), ("./nowhere", "There is no model"), ("/no/such/folder", "There is no model"),
        ("a/b/c", "There is no model"), ("nowhere.gguf", "does not exist"),
    ],
)  # fmt: skip
def test_names_of_nothing(name: str, words: str):
    with pytest.raises(ModelError, match=r".") as caught:
        resolve(name)
    assert words in str(caught.value)


def test_a_single_weights_file_asks_for_its_folder(folder: Path):
    with pytest.raises(ModelError, match="name the folder"):
        resolve(folder / "model.safetensors")
    assert resolve(folder) == folder
