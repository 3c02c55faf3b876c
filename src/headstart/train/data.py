"""Prompts out of files, and the target's answers to them. A head learns what its own target says, not what a data set says."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.core import SamplingParams
from headstart.errors import BadInput, parse_json
from headstart.progress import bar, note

if TYPE_CHECKING:
    from headstart.llm import LLM

ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
FIELDS = ("instruction", "prompt", "question", "text")


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the assistant. The id comes from its content: the same text has the same id everywhere."""

    id: str
    messages: tuple[tuple[str, str], ...]  # (role, content)


@dataclass(frozen=True)
class Answer:
    """What the target wrote, as tokens."""

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]
    temperature: float = 0.0


# ------------------------------------------------------------------ prompts
def read_prompts(paths: Sequence[str | Path]) -> list[Prompt]:
    """The prompts of all files, each one once, in order."""
    if not paths:
        raise BadInput("No file of prompts was given.")
    found: dict[str, Prompt] = {}
    for path in paths:
        for prompt in read_file(Path(path)):
            found.setdefault(prompt.id, prompt)
    return list(found.values())


def read_file(path: Path) -> list[Prompt]:
    """Prompts of one file: a JSON list, a JSON object on each line, or plain text with a prompt on each line."""
    text = _read_text(path)
    if text.lstrip().startswith("[") and path.suffix in (".json", ""):
        found = [_of_item(item, f"{path}, item {i}") for i, item in enumerate(parse_json(text, str(path)), start=1)]
    elif path.suffix == ".json":
        raise BadInput(f"{path} is not a JSON list of objects: give a list, or one object per line in a .jsonl file.")
    else:
        lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
        as_json = path.suffix == ".jsonl" or all(line.lstrip().startswith("{") for _, line in lines)
        found = [_of_line(line, f"{path}, line {i}", as_json) for i, line in lines]
    if not found:
        raise BadInput(f"{path} holds no prompts.")
    return found


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BadInput(
            f"{path}, line {line}: this is not text in UTF-8; prompts come as text, JSON or JSON lines."
        ) from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise BadInput(f"{path}, line {line}: this is not text; prompts come as text, JSON or JSON lines.")
    if not text.strip():
        raise BadInput(f"{path} is empty: it should hold prompts.")
    return text


def _of_line(line: str, where: str, as_json: bool) -> Prompt:
    return _of_item(parse_json(line, where), where) if as_json else user_prompt(line)


def _of_item(item: Any, where: str) -> Prompt:
    """One object of a file, in any of the usual shapes."""
    if isinstance(item, str) and item.strip():
        return user_prompt(item)
    if not isinstance(item, Mapping):
        raise BadInput(f"{where}: expected an object with a prompt, not {type(item).__name__}.")
    if (turns := item.get("messages") or item.get("conversations")) is not None:
        return _prompt(_turns(turns, where))
    for name in FIELDS:
        if isinstance(item.get(name), str) and item[name].strip():
            extra = _input(item) if name == "instruction" else ""
            return user_prompt(f"{item[name].strip()}\n\n{extra}")
    raise BadInput(
        f"{where}: no prompt in it; expected one of {', '.join(FIELDS)}, messages or conversations, "
        f"and found {', '.join(map(str, item)) or 'nothing'}."
    )


def _input(item: Mapping[str, Any]) -> str:
    """What an instruction is about: its own `input`, or that of its first instance."""
    instances = item.get("instances")
    source = instances[0] if isinstance(instances, list) and instances and isinstance(instances[0], Mapping) else item
    value = source.get("input")
    return value.strip() if isinstance(value, str) else ""


def _turns(turns: Any, where: str) -> list[tuple[str, str]]:
    """A conversation up to its last user turn: what stands behind that is for the target to write."""
    out = []
    for turn in turns if isinstance(turns, list) else [None]:
        fields = turn if isinstance(turn, Mapping) else {}
        role = ROLES.get(str(fields.get("role") or fields.get("from")))
        content = fields.get("content") or fields.get("value")
        if role is None or not isinstance(content, str):
            raise BadInput(f"{where}: a turn should have a role (system, user, assistant) and a text.")
        out.append((role, content))
    while out and out[-1][0] != "user":
        out.pop()
    if not out:
        raise BadInput(f"{where}: no turn of the user in this conversation.")
    return out


def user_prompt(text: str) -> Prompt:
    return _prompt([("user", text.strip())])


def _prompt(messages: list[tuple[str, str]]) -> Prompt:
    digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
    return Prompt(digest, tuple(messages))


# ------------------------------------------------------------------ answers
def write_answers(
    llm: LLM,
    prompts: Sequence[Prompt],
    out: Path,
    max_tokens: int = 512,
    samples: int = 1,
    max_prompt: int | None = None,
    chunk: int = 256,
    seed: int = 0,
) -> list[Answer]:
    """Let the target answer, and append the answers to a file as they come. What the file already has is not asked again.

    With one sample per prompt, every other prompt is answered greedily and the rest at temperature 1; with more, the first
    answer to each prompt is greedy and the others are sampled. Prompts of more than `max_prompt` tokens get no answer.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted, began, tokens = unanswered(prompts, samples, out), time.monotonic(), 0
    with open(out, "a", encoding="utf-8") as file, bar("Answers", len(wanted), "answers") as advance:
        for start in range(0, len(wanted), chunk):
            jobs = [(p, i, encode(llm, p)) for p, i in wanted[start : start + chunk]]
            for answer in _ask(llm, jobs, max_tokens, samples, max_prompt, seed):
                file.write(json.dumps(vars(answer)) + "\n")
                tokens += len(answer.answer_ids)
            file.flush()
            os.fsync(file.fileno())
            advance(len(jobs))
            if not sys.stderr.isatty():  # there is no bar
                speed = tokens / (time.monotonic() - began)
                note(f"{start + len(jobs)} of {len(wanted)} answers, {speed:,.0f} tokens/s")
    found = read_answers(out)
    if empty := sum(not a.prompt_ids for a in found):
        note(f"{empty} prompts are longer than the {max_prompt} tokens that fit, and have no answer.")
    return found


def unanswered(prompts: Sequence[Prompt], samples: int, out: Path) -> list[tuple[Prompt, int]]:
    """(prompt, number of the sample) of what the file does not have yet. A last line that was torn off is removed from it."""
    done = {answer.id for answer in read_answers(out, repair=True)} if out.exists() else set()
    wanted = [(p, i) for p in prompts for i in range(samples) if answer_id(p, i) not in done]
    if done and wanted:
        note(f"{len(done)} answers are in {out} already; {len(wanted)} are left to write.")
    return wanted


def answer_id(prompt: Prompt, sample: int) -> str:
    return f"{prompt.id}-{sample}"


def encode(llm: LLM, prompt: Prompt) -> list[int]:
    """Through the chat template where the model has one."""
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    if llm.tokenizer.has_chat_template():
        return llm.tokenizer.chat(messages)
    return llm.tokenizer.encode("\n".join(m["content"] for m in messages) + "\n")


def temperature_of(prompt: Prompt, sample: int, samples: int) -> float:
    greedy = sample == 0 if samples > 1 else int(prompt.id, 16) % 2 == 0
    return 0.0 if greedy else 1.0


def _ask(
    llm: LLM,
    jobs: list[tuple[Prompt, int, list[int]]],
    max_tokens: int,
    samples: int,
    max_prompt: int | None,
    seed: int,
) -> Iterator[Answer]:
    """Answers to (prompt, number of the sample, token ids), all together; an empty one where a prompt is too long."""
    fit = [job for job in jobs if max_prompt is None or len(job[2]) <= max_prompt]
    params = [
        SamplingParams(
            temperature=temperature_of(p, i, samples),
            max_tokens=max_tokens,
            seed=int(p.id[:8], 16) + i + seed,
            detokenize=False,
        )
        for p, i, _ in fit
    ]
    outputs = llm.generate([ids for _, _, ids in fit], params) if fit else []
    answers = {
        (p.id, i): Answer(answer_id(p, i), ids, list(output.token_ids), how.temperature)
        for (p, i, ids), how, output in zip(fit, params, outputs, strict=True)
    }
    for p, i, _ in jobs:
        yield answers.get((p.id, i)) or Answer(answer_id(p, i), [], [])


def read_answers(path: Path, repair: bool = False) -> list[Answer]:
    return [_of_answer(line, where) for where, line in whole_lines(path, repair)]


def whole_lines(path: Path, repair: bool = False) -> list[tuple[str, bytes]]:
    """(where, line) of a file. A last line that a kill tore off is left out, and cut off with `repair`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from error
    whole = data.rfind(b"\n") + 1
    if repair and whole < len(data):
        note(f"{path}: the last line was torn off by a kill; it is written anew.")
        os.truncate(path, whole)
    lines = enumerate(data[:whole].split(b"\n"), start=1)
    return [(f"{path}, line {i}", line) for i, line in lines if line.strip()]


def _of_answer(line: bytes, where: str) -> Answer:
    try:
        item = json.loads(line)
        answer = Answer(
            str(item["id"]), list(item["prompt_ids"]), list(item["answer_ids"]), float(item.get("temperature", 0.0))
        )
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{where}: this is no answer; expected id, prompt_ids and answer_ids.") from None
    if not all(isinstance(t, int) and t >= 0 for t in answer.prompt_ids + answer.answer_ids):
        raise BadInput(f"{where}: a token id is not a whole number of at least 0.")
    return answer
