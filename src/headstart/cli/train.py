"""`headstart train KIND`: a drafter for a target, learned from the target's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.groups import expand
from headstart.cli.options import MODEL, Quiet, option
from headstart.progress import set_quiet

if TYPE_CHECKING:
    from headstart.train.options import Options
    from headstart.train.run import Report

ANSWERS, HEAD, DRAFT, TRAINING, RUN = "Answers", "Head", "Draft model", "Training", "Run"

train = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Train a drafter for a target, on what the target itself writes.",
)

Out = Annotated[str, option("--out", "-o", help="Folder for the result; a run that was stopped goes on there.")]
Target = Annotated[str, option("--target", "-m", help="Built-in name, folder, GGUF file or hub id.", panel=MODEL)]
Levels = Annotated[int, option("--levels", help="Drafted tokens in a row that are trained.", panel=TRAINING)]
Decay = Annotated[
    float, option("--decay", help="How much each further level counts, of the one before.", panel=TRAINING)
]
LearnOutput = Annotated[
    bool,
    option(
        "--learn-output/--no-learn-output",
        help="Learn the matrix behind the logits too; otherwise it stays the target's.",
        panel=HEAD,
    ),
]


@dataclass(frozen=True)
class AnswerOptions:
    prompts: Annotated[
        list[str] | None,
        option(
            "--prompts",
            "-p",
            help="File of prompts; repeat for more. JSON list, JSON lines or plain text, one prompt per line.",
            panel=ANSWERS,
            show_default=False,
        ),
    ] = None
    answers: Annotated[
        list[str] | None,
        option(
            "--answers",
            help="File of answers from an earlier run (work/answers.jsonl), instead of prompts or beside them.",
            panel=ANSWERS,
            show_default=False,
        ),
    ] = None
    more_prompts: Annotated[
        int,
        option(
            "--more-prompts",
            help="Let the target write so many more prompts, after the example of those in the files; a few dozen will do.",
            panel=ANSWERS,
        ),
    ] = 0
    samples: Annotated[
        int,
        option("--samples", help="Answers to each prompt: the first greedy, further ones sampled.", panel=ANSWERS),
    ] = 1
    max_tokens: Annotated[int, option("--max-tokens", help="Longest answer, in tokens.", panel=ANSWERS)] = 512
    answer_batch: Annotated[
        int, option("--answer-batch", help="Answers written at a time, on a GPU.", panel=ANSWERS)
    ] = 256


@dataclass(frozen=True)
class Eagle3Head:
    draft_vocab: Annotated[
        int, option("--draft-vocab", help="Tokens that the head can draft: those used most.", panel=HEAD)
    ] = 16384
    layers: Annotated[int, option("--layers", help="Transformer layers of the head.", panel=HEAD)] = 1
    intermediate: Annotated[
        int | None, option("--intermediate", help="Width of its MLP. [default: the target's]", panel=HEAD)
    ] = None
    learn_output: LearnOutput = True
    embeddings: Annotated[
        bool,
        option(
            "--embeddings/--no-embeddings",
            help="Write the token embeddings too; without them the head is smaller and takes the target's.",
            panel=HEAD,
        ),
    ] = True
    lean: Annotated[
        bool,
        option(
            "--lean",
            help="Write neither embeddings nor output matrix: the smallest file, for Headstart alone. Needs --no-learn-output.",
            panel=HEAD,
        ),
    ] = False
    levels: Levels = 5
    decay: Decay = 0.8


@dataclass(frozen=True)
class MedusaHead:
    blocks: Annotated[int, option("--blocks", help="Residual blocks of a level.", panel=HEAD)] = 1
    learn_output: LearnOutput = True
    dialect: Annotated[
        str,
        option(
            "--dialect",
            help="Who shall read the result: vllm, or medusa for the project's own code. Headstart reads both.",
            panel=HEAD,
        ),
    ] = "vllm"
    levels: Levels = 5
    decay: Decay = 0.8


@dataclass(frozen=True)
class MlpHead:
    inner: Annotated[
        int | None, option("--inner", help="Width of the state behind a token. [default: the target's]", panel=HEAD)
    ] = None
    tie: Annotated[
        bool,
        option(
            "--tie/--no-tie",
            help="All levels share their weights, which makes the result about as many times smaller.",
            panel=HEAD,
        ),
    ] = True
    scale_input: Annotated[
        bool,
        option("--scale-input/--no-scale-input", help="Bring the target's states to one size first.", panel=HEAD),
    ] = True
    levels: Levels = 4
    decay: Decay = 1.0


@dataclass(frozen=True)
class DraftModel:
    draft: Annotated[
        str | None,
        option(
            "--draft",
            help="A small model with the target's tokens to go on from: name, folder or hub id.",
            panel=DRAFT,
            show_default=False,
        ),
    ] = None
    layers: Annotated[
        int | None,
        option(
            "--layers",
            help="Instead: a new model with so many of the target's layers, the first ones.",
            panel=DRAFT,
            show_default=False,
        ),
    ] = None
    hidden: Annotated[
        int | None,
        option(
            "--hidden",
            help="Width of the new model. Another one than the target's begins at random, and needs far more data. "
            "[default: the target's]",
            panel=DRAFT,
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class TrainingOptions:
    loss: Annotated[
        str,
        option(
            "--loss",
            help="How far from the target's distribution: kl (forward), rkl (reverse), tv (total variation), ce (its first "
            "choice alone), or a sum such as kl+tv.",
            panel=TRAINING,
        ),
    ] = "kl"
    rate: Annotated[
        float | None,
        option("--rate", help="Learning rate at its highest. [default: by the width of the model]", panel=TRAINING),
    ] = None
    schedule: Annotated[
        str, option("--schedule", help="How the rate falls: cosine, linear or constant.", panel=TRAINING)
    ] = "cosine"
    warmup: Annotated[
        int | None,
        option(
            "--warmup",
            help="Steps until the rate is at its highest. [default: 100, or a tenth of --steps if fewer]",
            panel=TRAINING,
        ),
    ] = None
    length: Annotated[int, option("--length", help="Tokens of a packed sequence.", panel=TRAINING)] = 1024
    batch: Annotated[int, option("--batch", help="Sequences in a step.", panel=TRAINING)] = 8
    seed: Annotated[int, option("--seed", help="Of the order of the data and the first weights.", panel=TRAINING)] = 0


@dataclass(frozen=True)
class RunOptions:
    minutes: Annotated[
        float | None, option("--minutes", help="Train for so long. [default: 10, or as --steps says]", panel=RUN)
    ] = None
    steps: Annotated[int | None, option("--steps", help="Train for so many steps.", panel=RUN)] = None
    held_out: Annotated[
        float, option("--held-out", help="Share of the prompts that only measures, and is not trained on.", panel=RUN)
    ] = 0.02
    eval_every: Annotated[int, option("--eval-every", help="Steps between two looks at held-out text.", panel=RUN)] = (
        500
    )
    eval_depth: Annotated[int, option("--eval-depth", help="Tokens of a chain there and in the engine.", panel=RUN)] = 5
    trial_every: Annotated[
        int | None,
        option(
            "--trial-every",
            help="Looks from one trial in the engine to the next; 0: none. [default: as many as take a tenth of the time]",
            panel=RUN,
        ),
    ] = None
    trial_prompts: Annotated[int, option("--trial-prompts", help="Held-out prompts of a trial.", panel=RUN)] = 16
    trial_tokens: Annotated[int, option("--trial-tokens", help="Longest answer in a trial.", panel=RUN)] = 128
    patience: Annotated[
        int,
        option(
            "--patience",
            help="Stop when so many measurements in a row brought no gain: trials, or looks without them; 0: never.",
            panel=RUN,
        ),
    ] = 5
    min_gain: Annotated[
        float, option("--min-gain", help="What counts as a gain, in tokens per target forward.", panel=RUN)
    ] = 0.01
    tensorboard: Annotated[
        bool | None,
        option(
            "--tensorboard/--no-tensorboard",
            help="Curves for TensorBoard in OUT/work/tensorboard. [default: where it is installed]",
            panel=RUN,
            show_default=False,
        ),
    ] = None
    name: Annotated[
        str | None,
        option("--name", help="The target's name in the result. [default: as in --target]", panel=RUN),
    ] = None
    device: Annotated[str, option("--device", help="auto, cpu, cuda or cuda:0.", panel=MODEL)] = "auto"
    dtype: Annotated[str, option("--dtype", help="auto, float32, bfloat16 or float16.", panel=MODEL)] = "auto"


@train.callback()
def _train() -> None:
    """Train a drafter for a target, on what the target itself writes."""


@train.command("eagle3")
@expand
def train_eagle3(
    out: Out, target: Target, data: AnswerOptions, head: Eagle3Head, training: TrainingOptions, run: RunOptions,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train an EAGLE-3 head: one small layer that reads the target's hidden states and drafts what comes next.

    First the target answers the prompts, half of them greedily and half at temperature 1; the answers are kept in
    OUT/work/answers.jsonl. Then the head learns to foresee them, several tokens in a row, as it will draft. A part of the
    prompts is held out: it shows how often the head agrees with the target, and how many tokens a target forward would give.
    Some of them are answered in the engine with the head as it is, on the way; a run that gains nothing any more stops.
    The best head is written to OUT in vLLM's speculators format, with a card.

    Stop with Ctrl-C, or lose the machine: the same command goes on from the last checkpoint.

    Example: `headstart train eagle3 -m smollm2 -p gsm8k.jsonl -p code.json --out head --minutes 30`
    """
    set_quiet(quiet)
    from headstart.train.eagle3 import Eagle3Options

    _train_kind(Eagle3Options, out, target, data, head, training, run)


@train.command("medusa")
@expand
def train_medusa(
    out: Out, target: Target, data: AnswerOptions, head: MedusaHead, training: TrainingOptions, run: RunOptions,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train Medusa heads: for each token of a draft a network of its own, on the target's last hidden state.

    Drafting is one pass for all levels; but none knows what the others say, so later ones are harder to get right. Each level
    has an output matrix of the target's size: large where the vocabulary is.

    Data, training, held-out text and resuming are as in `headstart train eagle3 --help`.

    Example: `headstart train medusa -m smollm2 -p gsm8k.jsonl --levels 3 --out heads --minutes 30`
    """
    set_quiet(quiet)
    from headstart.train.medusa import MedusaOptions

    _train_kind(MedusaOptions, out, target, data, head, training, run)


@train.command("mlp")
@expand
def train_mlp(
    out: Out, target: Target, data: AnswerOptions, head: MlpHead, training: TrainingOptions, run: RunOptions,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train an MLP speculator: a small recurrent network that reads the target's last hidden state and its own tokens.

    Between Medusa and EAGLE-3: each level knows the token before it, and nothing attends. It is written in IBM's dialect,
    which vLLM reads.

    Data, training, held-out text and resuming are as in `headstart train eagle3 --help`.

    Example: `headstart train mlp -m smollm2 -p gsm8k.jsonl --out speculator --minutes 30`
    """
    set_quiet(quiet)
    from headstart.train.mlp import MlpOptions

    _train_kind(MlpOptions, out, target, data, head, training, run)


@train.command("draft")
@expand
def train_draft(
    out: Out, target: Target, data: AnswerOptions, draft: DraftModel, training: TrainingOptions, run: RunOptions,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Distil a draft model: a small model that learns to say what the target says.

    Name one that has the target's tokens (`--draft`), or let one be made: of the target's kind with fewer layers (`--layers`),
    which begins with the target's embeddings and first layers, and narrower if you say so (`--hidden`). The result is a
    folder as transformers writes it, with the tokenizer; every engine that takes a draft model takes it.

    Data, training, held-out text and resuming are as in `headstart train eagle3 --help`.

    Example: `headstart train draft -m smollm2 -p gsm8k.jsonl --layers 4 --loss kl+tv --out draft --minutes 30`
    """
    set_quiet(quiet)
    from headstart.train.draft import DraftOptions

    _train_kind(DraftOptions, out, target, data, draft, training, run)


def _train_kind(kind: type[Options], out: str, target: str, *groups: Any) -> None:
    """The run that these groups of options describe."""
    from headstart.train.run import train as run

    fields = {name: value for group in groups for name, value in vars(group).items()}
    fields |= {name: tuple(fields[name] or ()) for name in ("prompts", "answers")}
    if fields["minutes"] is None and fields["steps"] is None:
        fields["minutes"] = 10.0
    _print(run(kind(target=target, out=out, **fields)))


def _print(report: Report) -> None:
    """What came out, on standard output."""
    if not report.ended:
        print(f"Stopped at step {report.steps}; the same command goes on from there.")
    print(f"{report.folder}: {report.steps} steps, {report.tokens:,} tokens, {report.seconds / 60:.1f} minutes")
    if report.best is not None:
        agree = ", ".join(f"{100 * a:.0f}%" for a in report.best["agreement"])
        print(
            f"Held-out text: {report.best['block_efficiency']:.2f} tokens per target forward with a chain of "
            f"{len(report.best['agreement'])}; agreement by level {agree}"
        )
        if trial := report.best.get("engine"):
            print(
                f"In the engine: {trial['block_efficiency']:.2f} tokens per target forward on {trial['prompts']} held-out "
                f"prompts; predicted speed-up {trial['speedup']:.2f} for one request at a time on this machine"
            )
