"""`headstart train eagle3`: a head that drafts for a target, learned from the target's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.groups import expand
from headstart.cli.options import MODEL, Quiet, option
from headstart.progress import set_quiet

if TYPE_CHECKING:
    from headstart.train.run import Report

ANSWERS, HEAD, TRAINING, RUN = "Answers", "Head", "Training", "Run"

train = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Train a drafter for a target, on what the target itself writes.",
)


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
    samples: Annotated[
        int,
        option("--samples", help="Answers to each prompt: the first greedy, further ones sampled.", panel=ANSWERS),
    ] = 1
    max_tokens: Annotated[int, option("--max-tokens", help="Longest answer, in tokens.", panel=ANSWERS)] = 512
    answer_batch: Annotated[
        int, option("--answer-batch", help="Answers written at a time, on a GPU.", panel=ANSWERS)
    ] = 256


@dataclass(frozen=True)
class HeadOptions:
    draft_vocab: Annotated[
        int, option("--draft-vocab", help="Tokens that the head can draft: those used most.", panel=HEAD)
    ] = 16384
    layers: Annotated[int, option("--layers", help="Transformer layers of the head.", panel=HEAD)] = 1
    intermediate: Annotated[
        int | None, option("--intermediate", help="Width of its MLP. [default: the target's]", panel=HEAD)
    ] = None
    learn_output: Annotated[
        bool,
        option(
            "--learn-output/--no-learn-output",
            help="Learn the matrix behind the logits too; otherwise it stays the target's.",
            panel=HEAD,
        ),
    ] = True
    name: Annotated[
        str | None,
        option("--name", help="The target's name in the result. [default: as in --target]", panel=HEAD),
    ] = None
    embeddings: Annotated[
        bool,
        option(
            "--embeddings/--no-embeddings",
            help="Write the token embeddings too; without them the head is smaller and takes the target's.",
            panel=HEAD,
        ),
    ] = True


@dataclass(frozen=True)
class TrainingOptions:
    levels: Annotated[
        int,
        option("--levels", help="Drafted tokens in a row that are trained, on the head's own states.", panel=TRAINING),
    ] = 5
    loss: Annotated[
        str, option("--loss", help="kl, rkl, tv, ce, or a sum such as kl+tv, against the target.", panel=TRAINING)
    ] = "kl"
    decay: Annotated[
        float, option("--decay", help="How much each further level counts, of the one before.", panel=TRAINING)
    ] = 0.8
    rate: Annotated[
        float | None,
        option("--rate", help="Learning rate at its highest. [default: by the width of the target]", panel=TRAINING),
    ] = None
    schedule: Annotated[
        str, option("--schedule", help="How the rate falls: cosine, linear or constant.", panel=TRAINING)
    ] = "cosine"
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
    device: Annotated[str, option("--device", help="auto, cpu, cuda or cuda:0.", panel=MODEL)] = "auto"
    dtype: Annotated[str, option("--dtype", help="auto, float32, bfloat16 or float16.", panel=MODEL)] = "auto"


@train.callback()
def _train() -> None:
    """Train a drafter for a target, on what the target itself writes."""


@train.command("eagle3")
@expand
def train_eagle3(
    out: Annotated[str, option("--out", "-o", help="Folder for the head; a run that was stopped goes on there.")],
    target: Annotated[str, option("--target", "-m", help="Built-in name, folder, GGUF file or hub id.", panel=MODEL)],
    data: AnswerOptions,
    head: HeadOptions,
    training: TrainingOptions,
    run: RunOptions,
    quiet: Quiet = False,
) -> None:
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
    from headstart.train import run as runs

    fields = vars(data) | vars(head) | vars(training) | vars(run)
    fields |= {name: tuple(fields[name] or ()) for name in ("prompts", "answers")}
    if fields["minutes"] is None and fields["steps"] is None:
        fields["minutes"] = 10.0
    _print(runs.train_eagle3(runs.Eagle3Options(target=target, out=out, **fields)))


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
