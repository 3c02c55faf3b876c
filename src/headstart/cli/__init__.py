"""The command line: one file per verb. Heavy imports happen inside a verb, so `headstart --help` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headstart.cli import (
    bench,
    chat,
    check,
    convert,
    demo,
    doctor,
    export,
    generate,
    models,
    pairs,
    plan,
    serve,
    simulate,
    train,
    tree,
    tune,
)
from headstart.errors import HeadstartError


class Verbs(TyperGroup):
    """A user's mistake ends as one sentence and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HeadstartError as error:
            print(f"headstart: {error}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from headstart import __version__

        print(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def headstart(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Language models, several times faster, with the same output.

    Start with `headstart demo`; then `headstart generate "Why is the sky blue?" --drafter ngram`.
    """


for verb in (
    demo.demo, generate.generate, chat.chat, models.models, doctor.doctor, pairs.pairs, check.check,
    plan.plan, tune.tune, export.export, convert.convert, tree.tree,
    simulate.simulate,
):  # fmt: skip
    app.command()(verb)
app.command(context_settings={"auto_envvar_prefix": "HEADSTART_SERVE"})(serve.serve)
app.add_typer(bench.bench, name="bench")
app.add_typer(train.train, name="train")


def main() -> None:
    app(prog_name="headstart")
