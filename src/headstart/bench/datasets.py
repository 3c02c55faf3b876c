"""Files of prompts, read into rows: JSON lines, a JSON list, parquet or CSV, gzipped or not, and plain text.

A file is only read: nothing is fetched, and nothing in it is run. What a row means is for `workloads` to say.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import BadInput, parse_json

MOST_BYTES = 2 << 30  # of a file, unpacked: a small gzip may hold a disk full of zeros
MOST_NAMES = 12  # of the fields that an error lists


@dataclass(frozen=True)
class Row:
    """One entry of a file, and where it stands: for errors, and for the id of a prompt that has none of its own."""

    number: int
    where: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        return self.check_text(self._get(name), f"the field {name!r}")

    def items(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self.wrong(f"the field {name!r} should be a list, not {type(value).__name__}")
        return value

    def id(self, name: str = "id") -> str:
        """The data set's own, or the number of the row."""
        value = self.fields.get(name)
        if value is None or value == "":
            return str(self.number)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self.check_text(value, f"the field {name!r}")

    def check_text(self, value: Any, what: str) -> str:
        if not isinstance(value, str):
            raise self.wrong(f"{what} should be a text, not {type(value).__name__}")
        if not value.strip():
            raise self.wrong(f"{what} is empty")
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON may spell half a character, which no tokenizer takes
            raise self.wrong(f"{what} holds half of a character") from None
        return value

    def wrong(self, what: str) -> BadInput:
        return BadInput(f"{self.where}: {what}.")

    def _get(self, name: str) -> Any:
        if name not in self.fields:
            raise self.wrong(f"there is no field {name!r}, only {quoted(list(self.fields)) or 'an empty object'}")
        return self.fields[name]


def quoted(names: Sequence[Any]) -> str:
    more = ", ..." if len(names) > MOST_NAMES else ""
    return ", ".join(repr(str(name)[:40]) for name in names[:MOST_NAMES]) + more


# ------------------------------------------------------------------ files
def read_rows(path: Path) -> list[Row]:
    """The rows of a file, whose kind is told by its first bytes, or by its name where they don't tell."""
    data, suffix = _read(path)
    if not data.strip():
        rows = []
    elif suffix == ".parquet" or data.startswith(b"PAR1"):
        rows = _parquet(path, data)
    elif suffix == ".csv":
        rows = _csv(path, _decode(path, data))
    else:
        text = _decode(path, data)
        rows = _json_list(path, text) if text.lstrip().startswith("[") else _json_lines(path, text)
    return _some(path, rows)


def read_lines(path: Path) -> list[Row]:
    """A plain text: each line that is not blank is a row with the field `text`."""
    lines = enumerate(_decode(path, _read(path)[0]).split("\n"), 1)
    return _some(path, [Row(i, f"{path}, line {i}", {"text": line.strip()}) for i, line in lines if line.strip()])


def _some(path: Path, rows: list[Row]) -> list[Row]:
    if not rows:
        raise BadInput(f"{path} is empty: it should hold prompts.")
    return rows


def _read(path: Path) -> tuple[bytes, str]:
    """What a file holds, unpacked, and the end of its name, which says what that is."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            data = _all_of(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return data, (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _all_of(path: Path, file: io.BufferedIOBase) -> bytes:
    """In pieces: to read up to a limit at once would first make room for all of it."""
    data = bytearray()
    while piece := file.read(1 << 20):
        data += piece
        if len(data) > MOST_BYTES:
            raise BadInput(f"{path} is too large: unpacked, a file may have {MOST_BYTES:,} bytes.")
    return bytes(data)


def _decode(path: Path, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {line}: this is not text in UTF-8.") from None
    if (at := text.find("\0")) >= 0:
        raise BadInput(f"{path}, line {text[:at].count(chr(10)) + 1}: this is not text.")
    return text


# ------------------------------------------------------------------ formats
def _json_lines(path: Path, text: str) -> list[Row]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            found.append(_row(number, where, parse_json(line, where)))
    return found


def _json_list(path: Path, text: str) -> list[Row]:
    items = enumerate(parse_json(text, str(path)), 1)
    return [_row(number, f"{path}, item {number}", item) for number, item in items]


def _row(number: int, where: str, item: Any) -> Row:
    if not isinstance(item, dict):
        raise BadInput(f"{where}: this should be a JSON object, not {type(item).__name__}.")
    return Row(number, where, item)


def _csv(path: Path, text: str) -> list[Row]:
    """A row may have several lines: it is said where it ends."""
    found = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    reader = found.reader  # the one that counts lines even where a row fails
    try:
        return [Row(i, f"{path}, line {reader.line_num}", fields) for i, fields in enumerate(found, 1)]
    except csv.Error as error:
        raise BadInput(f"{path}, line {reader.line_num}: this is not CSV ({error}).") from None


def _parquet(path: Path, data: bytes) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadInput(
            f"{path} is a parquet file, which needs pyarrow to be read: pip install 'headstart[bench]'."
        ) from None
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data)).read(use_threads=False)
        found = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise BadInput(f"{path} cannot be read as a parquet file: {reason}.") from None
    return [Row(i, f"{path}, row {i}", fields) for i, fields in enumerate(found, 1)]
