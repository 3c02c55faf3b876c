"""`headstart chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

from headstart.cli import ask
from headstart.cli.groups import expand
from headstart.cli.options import EngineOptions, Quiet, SpeculationOptions, option
from headstart.cli.sampling import SamplingOptions
from headstart.core import SamplingParams, Stats
from headstart.errors import BadInput
from headstart.progress import set_quiet

if TYPE_CHECKING:
    from headstart.llm import LLM

HELP = """\
/help   this list
/reset  forget the conversation
/stats  what speculation did so far
/exit   leave, as Ctrl-D does
Ctrl-C stops an answer; what was said so far stays in the conversation."""


@expand
def chat(
    engine: EngineOptions,
    speculation: SpeculationOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, option("--system", help="System message that opens the conversation.")] = None,
    quiet: Quiet = False,
) -> None:
    """Talk with a model, turn by turn. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.

    In a terminal, accepted draft tokens are coloured. From a pipe, each line is one turn.

    Example: `headstart chat --drafter ngram --temperature 0.7 --system "Answer in one sentence."`
    """
    set_quiet(quiet)
    params, config = sampling.params(), speculation.config()
    with engine.open(config) as llm:
        if not llm.tokenizer.has_chat_template():
            raise BadInput(f"{engine.model} has no chat template, so it cannot chat: use headstart generate.")
        Conversation(llm, params, config.method, system, quiet).run()


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, drafter: str, system: str | None, quiet: bool) -> None:
        from headstart.cli import show

        self.llm, self.params, self.drafter, self.system, self.quiet = llm, params, drafter, system, quiet
        self.messages = ask.messages(system)
        self.stats: list[Stats] = []
        self.seconds = 0.0
        self._say = show.say

    def run(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history
            if not self.quiet:
                self._say(f"{self.llm.model.name} is listening. /help lists the commands, Ctrl-D leaves.")
        while (line := _next_line()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._turn(line)

    def _command(self, line: str) -> bool:
        """False when it is time to leave."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/help":
            self._say(HELP)
        elif line == "/reset":
            self.messages = ask.messages(self.system)
            self._say("The conversation starts anew.")
        elif line == "/stats":
            self._say(self._summary())
        else:
            self._say(f"Unknown command {line.split()[0]}. /help lists the commands.")
        return True

    def _summary(self) -> str:
        from headstart.cli import show

        if not self.stats:
            return "Nothing was said yet."
        answers = "1 answer" if len(self.stats) == 1 else f"{len(self.stats)} answers"
        return f"{answers}: {show.summary(Stats.total(self.stats), self.seconds, self.drafter)}"

    def _turn(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            text = self._answer()
        except BadInput as error:  # most likely the conversation has become too long
            self.messages.pop()
            self._say(f"headstart: {error} /reset starts anew.", style="red")
            return
        self.messages.append({"role": "assistant", "content": text})

    def _answer(self) -> str:
        from headstart.cli.paint import Printer

        printer = Printer(lambda ids: self.llm.tokenizer.decode(ids, self.params.skip_special_tokens))
        text, began = "", time.perf_counter()
        try:
            with closing(self.llm.stream(self.messages, self.params)) as chunks:  # type: ignore[type-var]
                for chunk in chunks:
                    printer.add(chunk)
                    text += chunk.text
                    if chunk.completion is not None:
                        self.stats.append(chunk.completion.stats)
                        self.seconds += time.perf_counter() - began
        except KeyboardInterrupt:
            text and print(" ...", end="")
        print(flush=True)
        return text


def _next_line() -> str | None:
    """One turn, stripped; None at the end. Ctrl-C at the prompt clears the line."""
    terminal = sys.stdin.isatty()
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        if terminal:
            print()
        return None
    except KeyboardInterrupt:
        if not terminal:
            raise
        print()
        return ""
