"""`train(options)`: prompts in, a trained drafter out. What the command line calls; needs no command line."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headstart.errors import BadInput, HeadstartError
from headstart.models.load import Loaded, load, pick_device
from headstart.progress import note, status
from headstart.train import checkpoints, losses
from headstart.train.data import Answer, Prompt, read_answers, read_prompts, unanswered, write_answers
from headstart.train.export import bare_name, write_card
from headstart.train.invent import invent, read_invented
from headstart.train.loop import Limits, Loop
from headstart.train.memory import estimate
from headstart.train.optimizer import Optimizer
from headstart.train.options import Options
from headstart.train.packing import Document, batches, collate, documents, epochs, split
from headstart.train.scores import evaluate
from headstart.train.stopping import Look, best_look
from headstart.train.student import Student
from headstart.train.target import Teacher
from headstart.train.trial import Trials

if TYPE_CHECKING:
    from headstart.llm import LLM

KV_MEMORY = 16 << 30  # bytes for the engine that writes answers, on a GPU


@dataclass(frozen=True)
class Report:
    """What came out."""

    folder: Path
    ended: bool  # False: stopped before the end; the same call goes on
    steps: int
    tokens: int
    seconds: float
    history: list[Look]  # one entry for each look at held-out text

    @property
    def best(self) -> Look | None:
        """The look whose weights were exported; with what the engine said of them under `engine`."""
        return best_look(self.history)


def train(options: Options) -> Report:
    """Answers, training, export. Stopped anywhere, the same call goes on from there."""
    options.check()
    options.check_target()
    out = Path(options.out).expanduser()
    prompts = read_prompts(options.prompts) if options.prompts else []
    answers = [a for path in options.answers for a in read_answers(Path(path).expanduser())]
    if prompts:
        answers += answer_prompts(options, prompts, out / "work")
        release()
    torch.manual_seed(options.seed)
    target = load(options.target, options.device, options.dtype, runner="torch")
    try:
        return fit(options, target, list({a.id: a for a in answers}.values()), out)
    except torch.OutOfMemoryError as error:
        raise HeadstartError(
            f"Out of memory: lower batch ({options.batch}) or length ({options.length}). ({error})"
        ) from error


def answer_prompts(options: Options, prompts: list[Prompt], folder: Path) -> list[Answer]:
    """The target's answers, by our engine, in a file that a kill leaves usable; to more prompts of its own, if asked for."""
    path, own = folder / "answers.jsonl", folder / "prompts.jsonl"
    invented = list(read_invented(own)[0].values())[: options.more_prompts]
    if len(invented) == options.more_prompts and not unanswered(prompts + invented, options.samples, path):
        return read_answers(path)
    cuda = pick_device(options.device).type == "cuda"
    seqs = options.answer_batch if cuda else min(8, options.answer_batch)
    with writer(options, seqs) as llm:
        if options.more_prompts:
            prompts = prompts + invent(llm, prompts, options.more_prompts, own, 2 * seqs, options.seed)
        longest = min(options.length - 16, llm.model.max_len - options.max_tokens)
        return write_answers(llm, prompts, path, options.max_tokens, options.samples, longest, 4 * seqs, options.seed)


def writer(options: Options, seqs: int) -> LLM:
    """The target in an engine for so many requests at a time."""
    from headstart.llm import LLM

    where = pick_device(options.device)
    return LLM(
        options.target,
        speculative=None,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=seqs,
        max_batch_tokens=max(512, 4 * seqs),
        kv_memory=min(KV_MEMORY, torch.cuda.mem_get_info(where)[0] // 2) if where.type == "cuda" else None,
        runner="torch",
    )


def release() -> None:
    """Give back the memory of an engine that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fit(options: Options, target: Loaded, answers: list[Answer], out: Path) -> Report:
    """Train on answers, and write the best weights to `out`."""
    device = target.model.device
    train, held = (documents(part, options.length) for part in split(answers, options.held_out))
    if not train:
        raise BadInput("No answer is left to train on: they are too short, too few, or all of them were held out.")
    check_tokens(target, train + held)
    student = options.begin(target, train)
    say_what_comes(options, target.model, student, train, held)
    loop = make_loop(options, target, student, held, out / "work")
    loop.resume()
    ended = loop.run(
        lambda step: epochs(train, options.length, options.batch, student.levels, options.seed, step), device
    )
    take_best(loop, ended)
    export(options, target, student, loop, out, about_data(options, answers, train, held))
    p = loop.progress
    return Report(out, ended, p.step, p.tokens, p.seconds, p.history)


def check_tokens(target: Loaded, docs: list[Document]) -> None:
    vocab = target.model.get_input_embeddings().weight.shape[0]
    if (top := max(max(d.tokens) for d in docs)) >= vocab:
        raise BadInput(f"The answers have token {top}, but {target.name} has {vocab}: they are another model's.")


def make_loop(options: Options, target: Loaded, student: Student, held: list[Document], folder: Path) -> Loop:
    """The loop, with what a step computes and what is looked at and tried on the way."""
    model, depth = target.model, student.chain(options.eval_depth)
    how, device = losses.find(options.loss), model.device
    teacher = Teacher(model, student.taps, student.targets)
    groups = batches(mixed(held), options.length, options.batch)[: options.eval_batches]
    views = [collate(group, options.length, depth) for group in groups]
    rate = options.rate or options.default_rate(model.config.get_text_config().hidden_size)
    limits = Limits(
        options.steps,
        options.minutes,
        options.warmup_steps(),
        options.schedule,
        options.eval_every,
        options.trial_every,
        options.patience,
        options.min_gain,
        save_seconds=options.save_seconds,
    )
    return Loop(
        Optimizer(student.module, rate, options.betas, options.weight_decay, options.clip),
        lambda batch: losses.step_losses(student, teacher.teach(batch), batch, how),
        losses.level_weights(student.levels, student.decay).to(device),
        (lambda: evaluate(student, teacher, views, how, device)) if views else None,
        limits,
        folder,
        options.fingerprint(),
        Trials(target, student.drafter, prompts_of(held)[: options.trial_prompts], options.trial_tokens, depth),
        options.tensorboard,
    )


def mixed(held: list[Document]) -> list[Document]:
    """Of all files, where not all of it is looked at; always in the same order."""
    return random.Random(0).sample(held, len(held))


def prompts_of(held: list[Document]) -> list[list[int]]:
    """Each held-out prompt once."""
    return [list(prompt) for prompt in dict.fromkeys(tuple(d.tokens[: d.answer]) for d in mixed(held))]


def say_what_comes(options: Options, model: Any, student: Student, train: list[Document], held: list[Document]) -> None:
    tokens = sum(len(d.tokens) for d in train)
    learned = sum(p.numel() for p in student.module.parameters() if p.requires_grad)
    note(
        f"{len(train)} answers with {tokens:,} tokens to train on, {len(held)} held out; "
        f"{learned / 1e6:.1f} million weights to train."
    )
    note(estimate(model, student, options.batch, options.length).line())


def take_best(loop: Loop, ended: bool) -> None:
    """The best weights, or the last ones where nothing was held out; tried in the engine, unless someone stopped the run."""
    if loop.best.exists():
        best = checkpoints.load(loop.best)["masters"]
        with torch.no_grad():
            for key, p in loop.optimizer.weights.items():
                p.copy_(best[key])
    if ended:
        loop.try_best()


def export(options: Options, target: Loaded, student: Student, loop: Loop, out: Path, data: dict[str, Any]) -> None:
    """The student as it is, with its card."""
    name = options.target_name(target)
    with status(f"Writing {out}"):
        student.save(out, name)
        data |= {"tokens trained on": f"{loop.progress.tokens:,}", "steps": loop.progress.step}
        write_card(out, options.kind, student, bare_name(name), data, shown(options), loop.progress.history)


def about_data(options: Options, answers: list[Answer], train: list[Document], held: list[Document]) -> dict[str, Any]:
    """What was learned from, for the card."""
    files = {"files of prompts": options.prompts, "files of answers": options.answers}
    names = {what: ", ".join(Path(p).name for p in paths) for what, paths in files.items() if paths}
    docs, warm = train + held, sorted({a.temperature for a in answers} - {0.0})
    greedy = sum(d.greedy for d in docs)
    others = f", the others at temperature {', '.join(f'{t:g}' for t in warm)}" if greedy < len(docs) else ""
    return names | {
        "answers trained on": len(train),
        "answers held out": len(held),
        "greedy among them": f"{greedy}{others}",
        "longest answer": f"{max(len(d.tokens) - d.answer for d in docs)} tokens",
    }


def shown(options: Options) -> dict[str, Any]:
    """The options that had a part in the result; of files and folders their names alone."""
    hidden = {"prompts", "answers", "out"} | (
        set() if options.prompts else {"more_prompts", "max_tokens", "samples", "answer_batch"}
    )
    values = vars(options) | {"warmup": options.warmup_steps()}
    return {k: bare_name(v) if isinstance(v, str) else v for k, v in values.items() if k not in hidden}
