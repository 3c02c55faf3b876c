#!/usr/bin/env python3
"""Tables that stand in the README and in docs/bench.md: the `headstart bench` behind them, and where they go.

python benchmarks/published.py readme               measures (some 15 minutes), and writes the table into README.md
python benchmarks/published.py engines --vllm ENVIRONMENT --llamacpp PYTHON       the same for docs/bench.md
python benchmarks/published.py readme --show        only writes the table of what was measured before
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headstart.bench.records import BASELINE, Result
from headstart.bench.summary import Summary, by_category, speedup, summarise

HERE = Path(__file__).parent
END = "<!-- /bench -->"
KINDS = ("editing", "code", "chat")
PROMPTS = "--num-prompts 14 --max-tokens 96 --rounds 3"
Cells = list[str]


@dataclass(frozen=True)
class Table:
    name: str  # of the result's folder
    file: Path  # where it stands,
    target: str  # behind a mark with the command of make
    engines: str  # as the command has them; PLACEs are filled in
    names: dict[str, str]  # methods and what they are called
    head: Cells
    row: Callable[[Result, Summary], Cells]
    more: str = PROMPTS

    @property
    def result(self) -> Path:
        return HERE / "results" / self.name / "result.json"

    @property
    def begin(self) -> str:
        return f"<!-- bench: `make {self.target}` writes what stands here -->"

    @property
    def command(self) -> str:
        methods = ",".join(name for name in self.names if not name.endswith(BASELINE))
        return f"headstart bench --engine {self.engines} --method {methods} --runner torch {self.more}"


# ------------------------------------------------------------------ the two
def beside_generate(result: Result, s: Summary) -> Cells:
    kinds = by_category(result, s.method, s.point) if s.method != BASELINE else {}
    told = [f"{kinds[kind].value:.2f}" if kind in kinds else "1" for kind in KINDS]
    return [f"{s.tokens_per_second:.1f}", str(s.speedup or "1"), *told, _percent(s.identical)]


def beside_others(result: Result, s: Summary) -> Cells:
    engine, _, method = s.method.rpartition("/")
    plain = f"{engine}/{BASELINE}" if engine else BASELINE
    own = speedup(result.of(plain, s.point), result.of(s.method, s.point)) if method != BASELINE else None
    memory = "" if s.memory is None else f"{s.memory / 1e9:.1f}"
    forward = "" if s.block_efficiency is None else f"{s.block_efficiency:.2f}"
    first = f"{s.first_ms[50]:.0f}"
    return [
        f"{s.tokens_per_second:.1f}",
        str(own or "1"),
        forward,
        _percent(s.acceptance_rate),
        first,
        memory,
        _percent(s.identical),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


TABLES = (
    Table(
        "readme",
        HERE.parent / "README.md",
        "bench",
        "transformers,headstart",
        {
            "none": "transformers `generate`",
            "ngram:5": "transformers prompt lookup, 5 tokens",
            "headstart/none": "Headstart, plain",
            "headstart/ngram:5": "Headstart, ngram, 5 tokens",
            "headstart/suffix:5": "Headstart, suffix, 5 tokens",
            "headstart/auto": "Headstart, auto (the default)",
        },
        ["SmolLM2-135M, float32, greedy", "tokens/s", "times `generate`", *KINDS, "same text"],
        beside_generate,
    ),
    Table(
        "engines",
        HERE.parent / "docs" / "bench.md",
        "engines",
        "headstart,vllm:VLLM,llamacpp:LLAMACPP",
        {
            "none": "Headstart, plain",
            "ngram:5": "Headstart, ngram, 5 tokens",
            "auto": "Headstart, auto",
            "vllm/none": "vLLM, plain",
            "vllm/ngram:5": "vLLM, ngram, 5 tokens",
            "llamacpp/none": "llama.cpp (4 bits), plain",
            "llamacpp/ngram:5": "llama.cpp, ngram, 5 tokens",
        },
        ["SmolLM2-135M, greedy", "tokens/s", "times its own plain", "tokens a forward", "accepted", "ms to first", "GB",
         "text of Headstart, plain"],
        beside_others,
        "--num-prompts 7 --max-tokens 64 --rounds 3",
    ),
)  # fmt: skip


# ------------------------------------------------------------------ as Markdown
def render(table: Table, result: Result) -> str:
    """With where it comes from."""
    found = {s.method: s for s in summarise(result)}
    rows = [[name, *table.row(result, found[method])] for method, name in table.names.items()]
    lines = ["| " + " | ".join(cells) + " |" for cells in (table.head, ["---"] * len(table.head), *rows)]
    return "\n".join([*lines, "", source(table, result)])


def source(table: Table, result: Result) -> str:
    at = result.provenance
    versions = ", ".join(f"{name} {at['versions'][name]}" for name in ("torch", "transformers"))
    others = {name.split("/")[0]: about["version"] for name, about in result.methods.items() if "version" in about}
    versions += "".join(f", {name} {version}" for name, version in others.items())
    where = f"{at['machine']['cores']} cores of {at['machine']['cpu']}"
    prompts, rounds = len(result.setting["prompts"]), result.setting["rounds"]
    path = table.result.relative_to(HERE.parent)
    link = Path("..") / path if table.file.parent.name == "docs" else path
    return "\n".join(
        [
            f"`make {table.target}` (`{table.command}`):",
            f"{prompts} prompts of seven kinds, medians of {rounds} rounds in turns, intervals of 95%,",
            "whole answers with their prompts;",
            f"{where}, {versions}, commit {at['commit']}, load average {at['load']:.1f} at the start;",
            f"every sample is in [{path}]({link}).",
        ]
    )


def put(table: Table, text: str, part: str) -> str:
    """The file with this between its marks."""
    before, _, rest = text.partition(table.begin)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{table.file} has no place for the table: {table.begin} ... {END}")
    return f"{before}{table.begin}\n{part}\n{END}{after}"


def measure(table: Table, places: dict[str, str]) -> None:
    command = table.command
    for place, where in places.items():
        command = command.replace(place, where)
    program = str(Path(sys.executable).with_name("headstart"))
    folder = table.result.parent
    table.result.unlink(missing_ok=True)
    done = subprocess.run([program, *command.split()[1:], "--out", str(folder), "--fresh"])
    if not table.result.is_file() or any(sample.error is not None for sample in Result.load(table.result).samples):
        sys.exit(done.returncode or 1)  # where texts differ, the table tells
    for file in (table.result, folder / "summary.md"):
        file.write_text(impersonal(file.read_text(encoding="utf-8")), encoding="utf-8")


def impersonal(text: str) -> str:
    """Where this checkout and its user's files lie is nobody's business."""
    text, home = text.replace(str(HERE.parent.resolve()), "."), str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[table.name for table in TABLES])
    parser.add_argument("--vllm", default="", help="the environment that has vLLM")
    parser.add_argument("--llamacpp", default="", help="a llama-server, or a Python with xllamacpp")
    parser.add_argument("--show", action="store_true", help="write the table of what was measured before")
    args = parser.parse_args()
    table = next(table for table in TABLES if table.name == args.table)
    if not args.show:
        measure(table, {"VLLM": args.vllm, "LLAMACPP": args.llamacpp})
    part = render(table, Result.load(table.result))
    table.file.write_text(put(table, table.file.read_text(encoding="utf-8"), part), encoding="utf-8")
    print(part)


if __name__ == "__main__":
    main()
