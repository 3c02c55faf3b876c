"""Look at a model's files before anything is loaded, and say in one sentence what is wrong with them."""

from __future__ import annotations

import json
import math
import operator
import struct
from pathlib import Path
from typing import Any

from headstart.errors import ModelError

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} should hold a JSON object.")
    return data


def safetensors_header(path: Path) -> dict[str, Any]:
    """Names, types, shapes and offsets, checked against the file's real size."""
    size = path.stat().st_size
    again = "Fetch the file again."
    with path.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise ModelError(f"{path} is {size} bytes long, too short for a safetensors file. {again}")
        length = struct.unpack("<Q", head)[0]
        if length > size - 8:
            raise ModelError(f"{path} ends inside its header ({length} bytes announced, {size} in the file). {again}")
        try:
            header = json.loads(stream.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"{path} has an unreadable safetensors header: {error}. {again}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a safetensors header that is no JSON object. {again}")
    header.pop("__metadata__", None)
    for name, info in header.items():
        _check_tensor(path, name, info, size - 8 - length)
    return header


def _check_tensor(path: Path, name: str, info: Any, room: int) -> None:
    try:
        begin, end = (operator.index(n) for n in info["data_offsets"])
        count = math.prod(operator.index(n) for n in info["shape"])
        expected = count * DTYPE_BYTES[info["dtype"]] if info["dtype"] in DTYPE_BYTES else end - begin
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: the entry of tensor {name!r} is malformed.") from error
    if end > room:
        raise ModelError(
            f"{path} is truncated: tensor {name!r} needs bytes {begin} to {end}, but only {room} follow the header. "
            "Fetch the file again."
        )
    if begin < 0 or end - begin != expected:
        raise ModelError(f"{path}: tensor {name!r} has {end - begin} bytes where its shape and type need {expected}.")


def check_folder(folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """The config of a model folder whose files are all there and whole."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a transformers model folder.")
    config = read_json(folder / "config.json")
    if "auto_map" in config and not trust_remote_code and not _known(config.get("model_type")):
        raise ModelError(
            f"{folder} needs code of its own (auto_map: {json.dumps(config['auto_map'])}). Headstart "
            "runs none unless asked: read that code, then pass trust_remote_code=True (--trust-remote-code)."
        )
    for path in shards(folder):
        safetensors_header(path)
    return config


def _known(model_type: str | None) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(n, str) for n in weight_map.values())
        ):
            raise ModelError(f"{index} names no weight files: its weight_map should tell the file of each tensor.")
        names = sorted(set(weight_map.values()))
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(
                f"{folder} lacks {missing[0]}{more} of {len(names)} weight files: fetch the missing shards."
            )
        return [folder / n for n in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
        raise ModelError(
            f"{folder} has its weights only in .bin or .pt files, which are Python pickles and can run code when loaded. "
            "Save the model once as safetensors on a machine that you trust (model.save_pretrained does)."
        )
    raise ModelError(
        f"{folder} holds no weights that can be read: no *.safetensors file was found. Of a hub repository, weights in .bin "
        "(pickles) and GGUF files are not fetched; a GGUF file can be named by its path."
    )
