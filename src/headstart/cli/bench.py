"""`headstart bench`: how much faster, on this model, these prompts, this machine; and is the output still the same?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headstart.bench.records import BASELINE
from headstart.cli.groups import expand
from headstart.cli.options import MODEL, SPECULATION, EngineOptions, Json, Quiet, engine_words, option, parse_bytes
from headstart.errors import BadInput
from headstart.progress import bar, note, set_quiet

if TYPE_CHECKING:
    from headstart.bench.methods import Method
    from headstart.bench.records import Result
    from headstart.bench.run import Engine, Plan
    from headstart.models.load import Loaded

WORK = "Work"
HERE, LAUNCHED = ("headstart", "transformers"), ("vllm", "llamacpp", "tabbyapi")  # engines: in this process, or started
ENDPOINT = "openai:"
RANDOM = "random"  # tokens of the model: it has to be there
METHODS, PROMPTS, TOKENS, ROUNDS = ("ngram,suffix,auto",), 20, 128, 3
QUICK = (("ngram,auto",), 7, 48, 2)  # the same
N = TypeVar("N", int, float)


# ------------------------------------------------------------------ what can be said
@dataclass(frozen=True)
class WorkOptions:
    method: Annotated[
        list[str] | None,
        option(
            "--method",
            help="What is compared with plain decoding: ngram, suffix, auto, draft_model:MODEL, eagle3:FOLDER, ...; with a "
            "draft length: ngram:5; several with commas, or as JSON with vLLM's keys; repeatable. "
            "[default: ngram,suffix,auto]",
            panel=WORK,
            show_default=False,
        ),
    ] = None
    on: Annotated[
        str,
        option(
            "--engine",
            help="Whose speed it is: headstart, transformers, vllm, llamacpp, tabbyapi (with :WHERE it is, where that is not "
            "on the path), or servers with OpenAI's API: openai:URL of a Headstart server, openai:none=URL,ngram=URL of any. "
            "Several with commas take turns; then --method ENGINE/METHOD is for one of them.",
            panel=WORK,
        ),
    ] = "headstart"
    engine_args: Annotated[
        str,
        option("--engine-args", help="For vllm, llamacpp or tabbyapi, as on its command line.", panel=WORK),
    ] = ""
    api_key: Annotated[
        str | None,
        option("--api-key", help="For servers that need one.", panel=WORK, envvar="OPENAI_API_KEY", show_default=False),
    ] = None
    dataset: Annotated[
        str,
        option(
            "--dataset",
            help="built-in, or NAME:PATH with gsm8k, spec_bench, speed_bench, humaneval, mt_bench, sharegpt, cnn_dailymail "
            "or text; or random.",
            panel=WORK,
        ),
    ] = "built-in"
    gsm8k: Annotated[str | None, option("--gsm8k", help="As --dataset gsm8k:PATH.", panel=WORK, show_default=False)] = (
        None
    )
    concurrency: Annotated[str, option("--concurrency", help="Requests at once; several with commas.", panel=WORK)] = (
        "1"
    )
    temperature: Annotated[str, option("--temperature", "-t", help="0 is greedy; several with commas.", panel=WORK)] = (
        "0"
    )
    max_tokens: Annotated[
        int | None, option("--max-tokens", help="Of each answer. [default: 128]", panel=WORK, show_default=False)
    ] = None
    num_prompts: Annotated[
        int | None, option("--num-prompts", "-n", help="How many. [default: 20]", panel=WORK, show_default=False)
    ] = None
    rounds: Annotated[
        int | None,
        option("--rounds", help="How often all of it is measured. [default: 3]", panel=WORK, show_default=False),
    ] = None
    seed: Annotated[int, option("--seed", help="Of the first answer; each has its own.", panel=WORK)] = 0
    ignore_eos: Annotated[bool, option("--ignore-eos", help="Answers go on to --max-tokens.", panel=WORK)] = False
    quick: Annotated[bool, option("--quick", help="A first impression, within two minutes.", panel=WORK)] = False

    def engines(self) -> dict[str, str]:
        """By name, with where they are, if that is said."""
        if self.on.startswith(ENDPOINT):
            return {ENDPOINT: self.on}
        parts = [part.strip().partition(":") for part in self.on.split(",")]
        if unknown := [name for name, *_ in parts if name not in HERE + LAUNCHED]:
            raise BadInput(f"--engine {unknown[0]} is not known: choose {', '.join(HERE + LAUNCHED)} or openai:URL.")
        if wrong := [name for name, _, where in parts if where and name in HERE]:
            raise BadInput(f"--engine {wrong[0]} is here: nobody needs to say where.")
        if twice := [name for name, *_ in parts if sum(name == other for other, *_ in parts) > 1]:
            raise BadInput(f"--engine names {twice[0]} twice: run them one after the other, and compare.")
        return {name: where for name, _, where in parts}

    @property
    def spec(self) -> str:
        """Of the workload."""
        return f"gsm8k:{self.gsm8k}" if self.gsm8k is not None else self.dataset

    def usual(self) -> tuple[Sequence[str], int, int, int]:
        """Methods, prompts, tokens and rounds."""
        methods, prompts, tokens, rounds = QUICK if self.quick else (METHODS, PROMPTS, TOKENS, ROUNDS)
        own = (self.num_prompts, self.max_tokens, self.rounds)
        numbers = [
            usual if given is None else given for given, usual in zip(own, (prompts, tokens, rounds), strict=True)
        ]
        for flag, value in zip(("--num-prompts", "--max-tokens", "--rounds"), numbers, strict=True):
            if value < 1:
                raise BadInput(f"{flag} {value} is not usable: expected a whole number from 1 on.")
        return self.method or methods, *numbers  # type: ignore[return-value]


@dataclass(frozen=True)
class ClassicOptions:
    """vLLM's names, so that an experiment moves over as it is."""

    target_model: Annotated[
        str | None, option("--target-model", help="As --model.", panel=MODEL, show_default=False)
    ] = None
    draft_model: Annotated[
        str | None,
        option("--draft-model", help="As --method draft_model:MODEL.", panel=SPECULATION, show_default=False),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        option(
            "--num-speculative-tokens", "-k", help="How deep drafts reach, unless a method says.", panel=SPECULATION
        ),
    ] = None
    use_tree: Annotated[bool, option("--use-tree", help="Drafts may branch.", panel=SPECULATION)] = False
    max_num_seqs: Annotated[
        int | None, option("--max-num-seqs", help="Requests in one forward. [default: --concurrency]", panel=MODEL)
    ] = None
    enforce_eager: Annotated[bool, option("--enforce-eager", help="As --no-kernels.", panel=MODEL)] = False
    tensor_parallel_size: Annotated[
        int, option("--tensor-parallel-size", help="GPUs for the target; with our own engine, 1.", panel=MODEL)
    ] = 1
    draft_tensor_parallel_size: Annotated[
        int, option("--draft-tensor-parallel-size", help="GPUs for the draft; with our own engine, 1.", panel=MODEL)
    ] = 1

    def common(self) -> dict[str, Any]:
        """What all methods share that draft."""
        told = {"num_speculative_tokens": self.num_speculative_tokens, "tree": self.use_tree or None}
        return {name: value for name, value in told.items() if value is not None}


# ------------------------------------------------------------------ the verb
bench = typer.Typer(invoke_without_command=True, rich_markup_mode="markdown")


@bench.callback()
@expand
def main(
    ctx: typer.Context,
    engine: EngineOptions,
    work: WorkOptions,
    classic: ClassicOptions,
    out: Annotated[
        str, option("--out", "-o", help="Folder for result.json, report.html, summary.md.")
    ] = "bench-results",
    fresh: Annotated[bool, option("--fresh", help="Begin anew, whatever the folder holds.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How much faster is it here, and is the output still the same?

    Plain decoding and each method answer the same prompts in turns, over several rounds. You are told tokens per second, the
    speed-up with an interval, acceptance, times to the first token and to the last, and whether all answers are the same. The
    folder gets `report.html` to look at, `summary.md` for a pull request, and `result.json` with every sample. A run that was
    stopped goes on with the same command. Exit code 1 means that answers differ where they must not, or are missing.

    Example: `headstart bench --quick`, or
    `headstart bench --method ngram,eagle3:FOLDER:3,auto --concurrency 1,4,16 --temperature 0,1`
    """
    if ctx.invoked_subcommand is not None:
        return
    set_quiet(quiet)
    engine = replace(
        engine,
        model=classic.target_model or engine.model,
        no_kernels=engine.no_kernels or classic.enforce_eager,
    )
    result = _measure(engine, work, classic, Path(out), fresh)
    if as_json:
        _print_json(result)
    else:
        _print(result, Path(out))
    if any(d.near_tie is False for d in result.differences) or any(s.error is not None for s in result.samples):
        raise typer.Exit(1)


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A result.json, or the folder that has it.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """What has changed between two runs, and whether it is more than noise."""
    from headstart.bench.compare import compare as compared
    from headstart.bench.compare import markdown

    print(markdown(compared(*(_load(path) for path in (before, after)))))


def _load(path: Path) -> Result:
    from headstart.bench.keep import FILE
    from headstart.bench.records import Result

    return Result.load(path / FILE if path.is_dir() else path)


# ------------------------------------------------------------------ from options to laps
def _measure(engine: EngineOptions, work: WorkOptions, classic: ClassicOptions, out: Path, fresh: bool) -> Result:
    """What can be said to be wrong is said before a model is loaded."""
    from headstart.bench import keep, run
    from headstart.bench.provenance import provenance

    asked = _methods(work, classic)
    names = [method.name for method in asked]
    contestant, vocab_size = _engine(engine, work, classic, names, out) if work.spec == RANDOM else (None, 0)
    plan = _plan(work, vocab_size)
    result = keep.begin(out, _setting(engine, work, classic, plan, asked), provenance(), fresh)
    left = len(list(plan.laps(names))) - len(result.laps)
    if result.laps:
        note(f"{out} has {len(result.laps)} laps already; {left} are left.")
    if left:
        contestant = contestant or _engine(engine, work, classic, names, out)[0]
        try:
            with bar("Measuring", left + len(asked), "laps") as advance:
                before = chain((0,), repeat(1))  # a lap is told when it begins: the one before it is done by then
                save, tell = (lambda r: r.save(out / keep.FILE)), (lambda what: advance(next(before), what))
                run.run(contestant, asked, plan, result, save, tell)
                advance(1)
        except KeyboardInterrupt:
            note(f"Stopped. What was measured is in {out}: the same command goes on.")
            raise typer.Exit(130) from None
    keep.write(out, result)
    return result


def _methods(work: WorkOptions, classic: ClassicOptions) -> list[Method]:
    """Those that are named; a draft model is one of them, and the only one where no other is."""
    from headstart.bench import methods

    engines = list(work.engines())
    named, *_ = work.usual()
    if classic.draft_model is not None:
        named = [*(work.method or []), f"draft_model:{classic.draft_model}"]
    elif work.method is None and "=" in work.on:
        named = [part.partition("=")[0] for part in work.on.removeprefix(ENDPOINT).split(",")]
        return [methods.Method(name) for name in dict.fromkeys([BASELINE, *named])]
    elif work.method is None and engines[0] not in ("headstart", ENDPOINT):
        named = ["ngram"]
    if "headstart" in engines and max(classic.tensor_parallel_size, classic.draft_tensor_parallel_size) != 1:
        raise BadInput("Our own engine computes on one device: --tensor-parallel-size has to be 1.")
    return methods.parse(named, classic.common(), engines)


def _engine(
    engine: EngineOptions, work: WorkOptions, classic: ClassicOptions, names: Sequence[str], out: Path
) -> tuple[Engine, int]:
    """Who answers, and how many tokens it knows (0: nobody says)."""
    if work.on.startswith(ENDPOINT):
        from headstart.engines.endpoint import EndpointEngine

        urls = _urls(work.on.removeprefix(ENDPOINT), names)
        return EndpointEngine(urls, classic.target_model, work.api_key), 0
    found = {name: _one_engine(name, where, engine, work, classic, out) for name, where in work.engines().items()}
    sizes = [size for _, size in found.values() if size]
    if len(found) == 1:
        return next(iter(found.values()))
    from headstart.engines.several import SeveralEngines

    return SeveralEngines({name: one for name, (one, _) in found.items()}), min(sizes, default=0)


def _one_engine(
    name: str, where: str, engine: EngineOptions, work: WorkOptions, classic: ClassicOptions, out: Path
) -> tuple[Engine, int]:
    if name in LAUNCHED:
        return _launched(name, where, engine, work, classic, out), 0
    if name == "transformers":
        from headstart.engines.hf import TransformersEngine

        loaded = _load_model(replace(engine, runner="torch"))
        return TransformersEngine(loaded, engine.device), loaded.vocab_size
    loaded = _load_model(engine)
    return _own(loaded, engine, classic), loaded.vocab_size


def _launched(
    name: str, where: str, engine: EngineOptions, work: WorkOptions, classic: ClassicOptions, out: Path
) -> Engine:
    from headstart.bench.methods import Method
    from headstart.engines.launched import LaunchedEngine
    from headstart.engines.launching import Order
    from headstart.models.load import pick_device, pick_dtype

    usual = EngineOptions()
    if "headstart" not in work.engines():
        for given in ("gpu_layers", "kv_type", "flash_attention", "quantize"):
            if getattr(engine, given) != getattr(usual, given):
                raise BadInput(f"--{given.replace('_', '-')} is for our own engine: tell {name} with --engine-args.")
    order = Order(
        engine.model,
        Method(BASELINE),
        port=0,
        max_len=engine.max_model_len,
        dtype=str(pick_dtype(engine.dtype, pick_device(engine.device))).removeprefix("torch."),
        threads=engine.threads,
        eager=classic.enforce_eager,
        tensor_parallel=classic.tensor_parallel_size,
        draft_tensor_parallel=classic.draft_tensor_parallel_size,
        at_once=classic.max_num_seqs or 0,
        trust_remote_code=engine.trust_remote_code,
        more=engine_words(work.engine_args),
    )
    return LaunchedEngine(name, where, order, out / "logs")


def _urls(text: str, names: Sequence[str]) -> dict[str, str]:
    """`URL` for all, or `NAME=URL` for each."""
    pairs = [part.partition("=") for part in text.split(",")]
    if len(pairs) == 1 and "://" in pairs[0][0]:
        return dict.fromkeys(names, text)
    if bad := [name for name, _, url in pairs if "://" not in url]:
        raise BadInput(
            f"--engine openai:{text} names no server for {bad[0]!r}: write openai:URL, or openai:NAME=URL,NAME=URL."
        )
    return {name: url for name, _, url in pairs}


def _load_model(engine: EngineOptions) -> Loaded:
    from headstart.models.llamacpp.native import LlamaOptions
    from headstart.models.load import load

    engine.set_threads()
    llama = LlamaOptions(engine.gpu_layers, engine.threads, engine.flash_attention, engine.kv_type)
    return load(
        engine.model, engine.device, engine.dtype, engine.max_model_len, engine.trust_remote_code, engine.runner, llama
    )


def _plan(work: WorkOptions, vocab_size: int) -> Plan:
    from headstart.bench import workloads
    from headstart.bench.records import Point
    from headstart.bench.run import Plan

    _, prompts, tokens, rounds = work.usual()
    chosen = workloads.load(work.spec, prompts, work.seed, vocab_size=vocab_size)
    heats = _numbers("--temperature", work.temperature, float, 0)
    numbers = _numbers("--concurrency", work.concurrency, int, 1)
    points = tuple(Point(number, heat) for heat in heats for number in numbers)
    return Plan(chosen, points, rounds, tokens, work.seed, work.ignore_eos)


def _numbers(flag: str, text: str, kind: Callable[[str], N], least: int) -> list[N]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise BadInput(f"{flag} {text} is not usable: expected numbers from {least} on, with commas between.")
    return list(dict.fromkeys(found))


def _setting(
    engine: EngineOptions, work: WorkOptions, classic: ClassicOptions, plan: Plan, methods: Sequence[Method]
) -> dict[str, Any]:
    """What has to be the same for laps to be of one result."""
    return {
        "engine": work.on,
        "model": engine.model,
        "device": engine.device,
        "dtype": engine.dtype,
        "quantize": engine.quantize,
        "runner": engine.runner,
        "threads": engine.threads,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": classic.max_num_seqs,
        "eager": engine.no_kernels,
        "tensor_parallel": [classic.tensor_parallel_size, classic.draft_tensor_parallel_size],
        "engine_args": work.engine_args,
        "workload": plan.workload.name,
        "prompts": [prompt.id for prompt in plan.workload.prompts],
        "methods": {method.name: dict(method.config) for method in methods},
        "points": [[point.concurrency, point.temperature] for point in plan.points],
        "rounds": plan.rounds,
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
        "ignore_eos": plan.ignore_eos,
    }


def _own(loaded: Loaded, engine: EngineOptions, classic: ClassicOptions) -> Engine:
    from headstart.bench.own import OwnEngine

    memory = None if engine.kv_memory is None else parse_bytes(engine.kv_memory)
    options = {
        "kv_memory": memory,
        "fuse": not engine.no_fuse,
        "kernels": not engine.no_kernels,
        "deterministic": engine.deterministic,
        "quantize": engine.quantize,
        "max_num_seqs": classic.max_num_seqs,
    }
    return OwnEngine(loaded, {name: value for name, value in options.items() if value is not None})


# ------------------------------------------------------------------ what is told
def _print_json(result: Result) -> None:
    from headstart.bench.summary import summarise
    from headstart.cli.show import print_json

    told = {"summaries": summarise(result), "differences": result.differences, "setting": result.setting}
    print_json(told | {"provenance": result.provenance})


def _print(result: Result, out: Path) -> None:
    from rich.table import Table

    from headstart.bench.keep import FILE, PAGE, SHORT
    from headstart.bench.summary import summarise
    from headstart.cli.show import out as console

    table = Table("method", title_justify="left")
    heads = ("at once", "temperature", "tokens/s", "times plain", "tokens a forward", "accepted", "ms to first", "same")
    for head in heads:
        table.add_column(head, justify="right")
    for s in summarise(result):
        table.add_row(
            s.method,
            str(s.point.concurrency),
            f"{s.point.temperature:g}",
            f"{s.tokens_per_second:.1f}",
            str(s.speedup or "1"),
            _cell(s.block_efficiency, ".2f"),
            _cell(s.acceptance_rate, ".0%"),
            _cell(s.first_ms.get(50), ".0f"),
            _cell(s.identical, ".0%"),
        )
    console().print(table)
    for line in _failures(result):
        print(line)
    for d in result.differences:
        why = {
            True: "a near-tie that rounding can swap",
            False: "more than rounding explains",
            None: "why is not known",
        }
        print(f"{d.method}, {d.point}: {d.prompt} differs from token {d.at} on, {why[d.near_tie]}.")
    print(f"{out / PAGE} to look at, {out / SHORT} for a pull request, {out / FILE} with every sample.")


def _failures(result: Result) -> list[str]:
    """One line for each method and point where requests failed."""
    failed: dict[str, list[str]] = {}
    for s in result.samples:
        if s.error is not None:
            failed.setdefault(f"{s.method}, {s.point}", []).append(s.error)
    return [f"{where}: {len(errors)} requests failed: {errors[0]}" for where, errors in failed.items()]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
