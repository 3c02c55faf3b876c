"""`train_eagle3(options)`: prompts in, a trained head out. What the command line calls; needs no command line."""

from __future__ import annotations

import gc
import json
import random
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from headstart.errors import BadInput, ConfigError, HeadstartError
from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head
from headstart.models.heads.save import save_eagle3
from headstart.models.load import Loaded, load, pick_device
from headstart.progress import note, status
from headstart.train import board, checkpoints, eagle3, losses
from headstart.train.data import Answer, Prompt, read_answers, read_prompts, unanswered, write_answers
from headstart.train.export import write_card
from headstart.train.loop import Limits, Loop
from headstart.train.memory import Need, estimate
from headstart.train.optimizer import Optimizer, check_schedule
from headstart.train.packing import Document, batches, collate, documents, epochs, split
from headstart.train.stopping import Look, best_look
from headstart.train.target import Teacher, default_taps
from headstart.train.trial import Trials

KV_MEMORY = 16 << 30  # bytes for the engine that writes answers, on a GPU


@dataclass(frozen=True)
class Eagle3Options:
    """Everything about a run. A folder that has a checkpoint goes on from there, with the same options."""

    target: str
    out: str
    prompts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()  # files of answers that were written before; with these, no prompts are needed
    name: str | None = None  # of the target in what is written, where `target` is a folder
    embeddings: bool = True  # written with the head; without them it is much smaller, and takes the target's
    # answers
    max_tokens: int = 512
    samples: int = 1  # answers to each prompt
    answer_batch: int = 256  # requests at a time
    # the head
    draft_vocab: int = 16384
    taps: tuple[int, ...] | None = None
    layers: int = 1
    intermediate: int | None = None
    heads: int | None = None
    norm_before_residual: bool = True
    norm_before_fc: bool = True
    fc_norm: bool = False
    norm_output: bool = True
    learn_output: bool = True  # the matrix behind the logits; otherwise it stays the target's, and need not be kept
    # training
    levels: int = 5
    loss: str = "kl"
    decay: float = 0.8  # of the weight of a level's loss, to the next level
    rate: float | None = None  # None: by the width of the target
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    noise: float = 0.0
    warmup: int = 100
    schedule: str = "cosine"
    length: int = 1024  # tokens of a packed sequence
    batch: int = 8  # sequences of a step
    minutes: float | None = 10.0
    steps: int | None = None
    held_out: float = 0.02
    eval_every: int = 500
    eval_batches: int = 24
    eval_depth: int = 5  # tokens of a chain on held-out text and in the engine
    trial_every: int | None = None  # looks from one trial in the engine to the next; 0: none, None: a tenth of the time
    trial_prompts: int = 16
    trial_tokens: int = 128  # at most, of each answer
    patience: int = 5  # measurements without a gain that end a run; 0: none do
    min_gain: float = 0.01  # tokens per target forward
    tensorboard: bool | None = None  # None: where it is installed
    save_seconds: float = 120.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def flags(self) -> Eagle3Flags:
        return Eagle3Flags(self.norm_before_residual, self.norm_before_fc, self.fc_norm, self.norm_output)

    def check(self) -> None:
        """Say what cannot be before anything is loaded."""
        losses.find(self.loss)
        check_schedule(self.schedule)
        if not self.prompts and not self.answers:
            raise BadInput("Neither prompts nor answers were given: there is nothing to train on.")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError(
                "norm_before_fc and fc_norm exclude each other: the format of the result has one of them."
            )
        if self.minutes is None and self.steps is None:
            raise ConfigError("A run needs an end: give minutes or steps.")
        board.check(self.tensorboard)
        least = {"levels": 1, "length": 16, "batch": 1, "draft_vocab": 1, "layers": 1, "samples": 1, "max_tokens": 2}
        least |= {
            "eval_depth": 1,
            "trial_every": 0,
            "trial_prompts": 1,
            "trial_tokens": 8,
            "patience": 0,
            "min_gain": 0,
        }
        for name, low in least.items():
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)} is not usable: expected at least {low}.")


# Options that may change between a run and its continuation
FREE = {
    "out",
    "name",
    "embeddings",
    "prompts",
    "answers",
    "answer_batch",
    "minutes",
    "steps",
    "eval_every",
    "eval_batches",
    "trial_every",
    "trial_prompts",
    "trial_tokens",
    "patience",
    "min_gain",
    "tensorboard",
    "save_seconds",
}


@dataclass(frozen=True)
class Report:
    """What came out."""

    folder: Path
    ended: bool  # False: stopped before the end; the same call goes on
    steps: int
    tokens: int
    seconds: float
    history: list[dict[str, Any]]  # one entry for each look at held-out text

    @property
    def best(self) -> Look | None:
        """The look whose weights were exported; with what the engine said of them under `engine`."""
        return best_look(self.history)


def train_eagle3(options: Eagle3Options) -> Report:
    """Answers, training, export. Stopped anywhere, the same call goes on from there."""
    options.check()
    out = Path(options.out).expanduser()
    prompts = read_prompts(options.prompts) if options.prompts else []
    answers = [a for path in options.answers for a in read_answers(Path(path).expanduser())]
    if prompts:
        answers += answer_prompts(options, prompts, out / "work" / "answers.jsonl")
    torch.manual_seed(options.seed)
    target = load(options.target, options.device, options.dtype, runner="torch")
    try:
        return fit(options, target, list({a.id: a for a in answers}.values()), out)
    except torch.OutOfMemoryError as error:
        raise HeadstartError(
            f"Out of memory: lower batch ({options.batch}), length ({options.length}) or draft_vocab. ({error})"
        ) from error


def answer_prompts(options: Eagle3Options, prompts: list[Prompt], path: Path) -> list[Answer]:
    """The target's answers, by our engine, in a file that a kill leaves usable."""
    from headstart.llm import LLM

    if not unanswered(prompts, options.samples, path):
        return read_answers(path)
    where = pick_device(options.device)
    cuda = where.type == "cuda"
    seqs = options.answer_batch if cuda else min(8, options.answer_batch)
    with LLM(
        options.target,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=seqs,
        max_batch_tokens=max(512, 4 * seqs),
        kv_memory=min(KV_MEMORY, torch.cuda.mem_get_info(where)[0] // 2) if cuda else None,
        runner="torch",
    ) as llm:
        longest = min(options.length - 16, llm.model.max_len - options.max_tokens)
        found = write_answers(llm, prompts, path, options.max_tokens, options.samples, longest, 4 * seqs, options.seed)
    del llm
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found


def fit(options: Eagle3Options, target: Loaded, answers: list[Answer], out: Path) -> Report:
    """Train on answers, and write the best head to `out`."""
    device = target.model.device
    train, held = (documents(part, options.length) for part in split(answers, options.held_out))
    if not train:
        raise BadInput("No answer is left to train on: they are too short, too few, or all of them were held out.")
    head, teacher = begin(options, target, train, held)
    say_what_comes(options, target.model, head, train, held)
    trials = Trials(target, head, prompts_of(held)[: options.trial_prompts], options.trial_tokens, options.eval_depth)
    loop = make_loop(options, head, teacher, held, out / "work", device, trials)
    loop.resume()
    ended = loop.run(
        lambda step: epochs(train, options.length, options.batch, options.levels, options.seed, step), device
    )
    export(options, head, loop, out, {"train": len(train), "held out": len(held)}, ended)
    p = loop.progress
    return Report(out, ended, p.step, p.tokens, p.seconds, p.history)


def begin(
    options: Eagle3Options, target: Loaded, train: list[Document], held: list[Document]
) -> tuple[Eagle3Head, Teacher]:
    """A head that has learned nothing yet, and its teacher."""
    model, device = target.model, target.model.device
    vocab = model.get_input_embeddings().weight.shape[0]
    if (top := max(max(d.tokens) for d in train + held)) >= vocab:
        raise BadInput(f"The answers have token {top}, but {target.name} has {vocab}: they are another model's.")
    always = target.eos_ids | (target.tokenizer.special_ids if target.tokenizer else frozenset())
    choices = eagle3.draft_vocabulary(train, min(options.draft_vocab, vocab), vocab, sorted(always))
    taps = options.taps or default_taps(model.config.get_text_config().num_hidden_layers)
    layers = eagle3.layer_config(model.config, options.layers, options.intermediate, options.heads)
    head = eagle3.make_head(model, layers, options.flags(), taps, choices, options.name or target.name)
    head.lm_head.weight.requires_grad_(options.learn_output)
    head = eagle3.place(head, device, model.dtype)
    return head, Teacher(model, taps, head.targets)


def make_loop(
    options: Eagle3Options,
    head: Eagle3Head,
    teacher: Teacher,
    held: list[Document],
    folder: Path,
    device: torch.device,
    trials: Trials,
) -> Loop:
    """The loop, with what a step computes and what is looked at on the way."""
    how = losses.find(options.loss)
    groups = batches(mixed(held), options.length, options.batch)[: options.eval_batches]
    views = [collate(group, options.length, options.eval_depth) for group in groups]
    limits = Limits(
        options.steps,
        options.minutes,
        options.warmup,
        options.schedule,
        options.eval_every,
        options.trial_every,
        options.patience,
        options.min_gain,
        save_seconds=options.save_seconds,
    )
    return Loop(
        Optimizer(
            head, options.rate or default_rate(head.spec.hidden_size), options.betas, options.weight_decay, options.clip
        ),
        lambda batch: eagle3.step_losses(head, teacher.teach(batch), batch, options.levels, how, options.noise),
        eagle3.level_weights(options.levels, options.decay).to(device),
        (lambda: eagle3.evaluate(head, teacher, views, how, device)) if views else None,
        limits,
        folder,
        fingerprint(options),
        trials,
        options.tensorboard,
    )


def mixed(held: list[Document]) -> list[Document]:
    """Of all files, where not all of it is looked at; always in the same order."""
    return random.Random(0).sample(held, len(held))


def prompts_of(held: list[Document]) -> list[list[int]]:
    """Each held-out prompt once."""
    return [list(prompt) for prompt in dict.fromkeys(tuple(d.tokens[: d.answer]) for d in mixed(held))]


def default_rate(hidden_size: int) -> float:
    """Wide heads need smaller steps: 1e-3 at a width of 576, 1.5e-4 at 4096."""
    return min(1e-3, 0.6 / hidden_size)


def fingerprint(options: Eagle3Options) -> str:
    return json.dumps({k: v for k, v in asdict(options).items() if k not in FREE}, sort_keys=True)


def say_what_comes(
    options: Eagle3Options, model: Any, head: Eagle3Head, train: list[Document], held: list[Document]
) -> None:
    tokens = sum(len(d.tokens) for d in train)
    used = [t for d in train for t in d.tokens[d.answer :]]
    known = set(range(head.spec.vocab_size) if head.targets is None else head.targets.tolist())
    learned = sum(p.numel() for p in head.parameters() if p.requires_grad)
    note(
        f"{len(train)} answers with {tokens:,} tokens to train on, {len(held)} held out; "
        f"{learned / 1e6:.1f} million weights to train, the draft vocabulary of "
        f"{head.spec.draft_vocab_size} tokens covers {100 * sum(t in known for t in used) / len(used):.2f}% of the answers."
    )
    need: Need = estimate(model, head, options.batch, options.length, options.levels)
    note(need.line())


def export(
    options: Eagle3Options, head: Eagle3Head, loop: Loop, out: Path, counts: dict[str, int], ended: bool
) -> None:
    """The best weights, or the last ones where nothing was held out; tried in the engine, unless someone stopped the run."""
    name = head.spec.target or options.target
    if loop.best.exists():
        best = checkpoints.load(loop.best)["masters"]
        with torch.no_grad():
            for key, p in loop.optimizer.weights.items():
                p.copy_(best[key])
    if ended:
        loop.try_best()
    with status(f"Writing {out}"):
        save_eagle3(head, out, name, options.eval_depth, options.embeddings)
        data = {"prompts": ", ".join(Path(p).name for p in (*options.prompts, *options.answers))} | counts
        data |= {"tokens trained on": f"{loop.progress.tokens:,}", "steps": loop.progress.step}
        shown = {
            f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("prompts", "answers", "out")
        }
        write_card(out, name, data, shown, loop.progress.history)
