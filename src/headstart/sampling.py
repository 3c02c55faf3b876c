"""Logits -> distribution -> token.

The token of a row is argmax over v of log p(v) + g(seed, position, v), where p is the target's distribution after every
parameter of its request. Temperature 0 is the same rule without noise. Each row stands for one place in a draft tree:
its context is the request's tokens followed by the path to that node, so penalties inside a block see that block.

Order: bias, penalties, form, bans, temperature, top-k, top-p, min-p, typical-p (transformers' order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart.core import Choice, Request, TokenLogprobs
from headstart.noise import ceiling, gumbel, one, row_keys

SLACK = 1e-3  # by which rounding may move a score, and more
SHORTLIST = 1024  # tokens looked at first under top-k / top-p; all of them when these do not hold the mass


@dataclass(slots=True)
class Row:
    """One row of logits: whose it is, and the draft tokens between the request's last token and this place."""

    request: Request
    path: Sequence[int] = ()

    @property
    def position(self) -> int:
        """Of the token that this row chooses."""
        return len(self.request.tokens) + len(self.path)


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The token of each row. logits (R, V) -> R tokens."""
    if len(rows) == 1 and rows[0].request.params.greedy and not _adjusts(rows[0]):  # plain decoding of one request
        return argmax(logits)
    logits = adjust(logits, rows)
    greedy = [i for i, r in enumerate(rows) if r.request.params.greedy]
    if len(greedy) == len(rows):
        return argmax(logits)
    short = [i for i, r in enumerate(rows) if not r.request.params.greedy and r.request.params.truncates]
    full = [i for i, r in enumerate(rows) if not r.request.params.greedy and not r.request.params.truncates]
    tokens = [0] * len(rows)
    for index, pick in ((greedy, _pick_greedy), (full, _pick_full), (short, _pick_short)):
        if index:
            picked = pick(logits if len(index) == len(rows) else logits[index], [rows[i] for i in index])
            for i, token in zip(index, picked, strict=True):
                tokens[i] = token
    return tokens


def log_probabilities(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """(R, V) log p after every parameter; a greedy row puts all mass on its choice. Float64, for rejection."""
    logits = adjust(logits, rows).double()
    out = torch.full_like(logits, -torch.inf)
    for i, row in enumerate(rows):
        if row.request.params.greedy:
            out[i, argmax(logits[i : i + 1])[0]] = 0.0
        else:
            out[i] = _log_p(logits[i : i + 1], row)
    return out


def top_scores(
    logits: torch.Tensor, rows: Sequence[Row], k: int, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For drafters: the k best tokens of each row by log q + g (by log q when greedy), and their confidence.

    Returns tokens (R, k), confidence (R, k) = softmax of the ranked scores, and log q (R, V) before noise. `ids` (V,): the
    tokens that the columns stand for, where these are not the whole vocabulary; then rows must be such as `is_sure` says.
    """
    noisy = [i for i, r in enumerate(rows) if not r.request.params.greedy]
    logits = logits if ids is not None else adjust(logits, rows)
    if noisy:
        logq = torch.stack([_log_p(x[None], r) for x, r in zip(logits, rows, strict=True)])
    else:
        logq = logits.log_softmax(-1)
    if any(r.request.form is not None for r in rows):  # a form may allow nothing that a drafter knows
        logq = logq.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    scores = logq
    if noisy:
        scores = logq.clone()
        tokens = torch.arange(logq.shape[1], device=logq.device) if ids is None else ids
        scores[noisy] += gumbel(_keys([rows[i] for i in noisy], logq.device), tokens)
    best = scores.topk(min(k, scores.shape[1]), dim=-1)
    found = best.indices if ids is None else ids[best.indices]
    total = scores.logsumexp(-1, keepdim=True) if noisy else 0.0  # without noise the scores are log q, which sum to one
    return found, (best.values - total).exp().nan_to_num(0.0), logq


def _log_p(x: torch.Tensor, row: Row) -> torch.Tensor:
    """(1, V) adjusted logits -> (V,) log p under temperature and truncation; temperature 0 counts as 1 here."""
    if row.request.params.greedy:
        return x[0].log_softmax(-1)
    x = x / row.request.params.temperature
    if not row.request.params.truncates:
        return _min_p(x, [row])[0].log_softmax(-1)
    values, ids = _truncate(x, [row])
    return torch.full_like(x[0], -torch.inf).scatter(0, ids[0], values[0].log_softmax(-1))


def argmax(logits: torch.Tensor) -> list[int]:
    """First index of the largest value of each row. NumPy's is vectorised; torch's on CPU is not."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return [int(row.argmax()) for row in logits.numpy()]
    return logits.argmax(-1).tolist()


# ------------------------------------------------------------------ for runners that choose
def can_ask(request: Request) -> bool:
    """Can a runner choose this request's next tokens: from its logits, temperature, noise, top-k, top-p and min-p alone?"""
    least = request.params.min_tokens
    return request.can_be_chosen and (not least or request.num_output >= least)


def is_sure(request: Request) -> bool:
    """Will a runner that is asked always answer? Where unlikely tokens are left out, it may hand the question back."""
    return request.keeps_all and can_ask(request)


def ask(choice: Choice, asked: Sequence[tuple[Request, int, int]]) -> None:
    """Enter how each of these requests chooses: its first row, and how many. A row chooses the token behind its position."""
    drawing = [own for own in asked if not own[0].params.greedy]
    if not drawing:
        return
    choice.draws = True
    first, count = np.array([row for _, row, _ in drawing]), np.array([n for _, _, n in drawing])
    rows = np.repeat(first - (count.cumsum() - count), count) + np.arange(count.sum())
    manner = np.concatenate([r.manner for r, _, _ in drawing]).reshape(-1, 6).repeat(count, axis=0)
    choice.temperature[rows], choice.seeds[rows] = manner[:, 0], manner[:, 4:]
    if not all(r.keeps_all for r, _, _ in drawing):
        choice.truncates = True
        choice.top_k[rows], choice.top_p[rows], choice.min_p[rows] = manner[:, 1], manner[:, 2], manner[:, 3]


# ------------------------------------------------------------------ bias, bans, penalties
def adjust(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Float32 logits after bias, bans and penalties; the same tensor when no row asks for any."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    touched = [i for i, r in enumerate(rows) if _adjusts(r)]
    if not touched:
        return logits
    logits = logits.clone()
    for i in touched:
        _adjust_row(logits[i], rows[i])
    return logits


def _adjusts(row: Row) -> bool:
    request = row.request
    return request.changes_logits or row.position - len(request.prompt) < request.params.min_tokens


def _adjust_row(x: torch.Tensor, row: Row) -> None:
    """Change one row (V,) in place."""
    request, p = row.request, row.request.params
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=x.device)
        x[ids] += torch.tensor(list(p.logit_bias.values()), dtype=x.dtype, device=x.device)
    _penalise(x, row)
    banned = _banned(row)
    if row.position - len(request.prompt) < p.min_tokens:
        banned += list(request.stop_ids)
    banned = [t for t in dict.fromkeys(banned) if t < len(x)]
    if request.form is not None and (allowed := request.form.allowed(request.output, row.path)) is not None:
        banned = banned if allowed.sum() > allowed[banned].sum() else []  # the form has the last word
        x[torch.from_numpy(~allowed).to(x.device)] = -torch.inf
    if banned:
        x[torch.tensor(banned, device=x.device, dtype=torch.long)] = -torch.inf


def _penalise(x: torch.Tensor, row: Row) -> None:
    p = row.request.params
    if p.repetition_penalty != 1:
        seen = torch.tensor(np.unique([*row.request.tokens, *row.path]), device=x.device)
        x[seen] = torch.where(x[seen] > 0, x[seen] / p.repetition_penalty, x[seen] * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        own = [*row.request.output, *row.path]
        ids, counts = np.unique(np.array(own, dtype=np.int64), return_counts=True)
        cost = p.presence_penalty + p.frequency_penalty * counts
        x[torch.tensor(ids, device=x.device)] -= torch.tensor(cost, dtype=x.dtype, device=x.device)


def _banned(row: Row) -> list[int]:
    """The last token of each bad word whose other tokens stand right before this place."""
    out = []
    for word in row.request.bad_word_ids:
        head = list(word[:-1])
        start = max(len(row.request.prompt), len(row.request.tokens) - len(head))
        tail = [*row.request.tokens[start:], *row.path][-len(head) :] if head else []
        if tail == head:
            out.append(word[-1])
    return out


# ------------------------------------------------------------------ truncation and choice
def _column(rows: Sequence[Row], name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[getattr(r.request.params, name)] for r in rows], dtype=like.dtype, device=like.device)


def _keys(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    return torch.tensor(_row_keys(rows), dtype=torch.int64, device=device)


def _row_keys(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return row_keys([r.request.seed for r in rows], [r.position for r in rows])


def _pick_greedy(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    return argmax(logits)


def _pick_full(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    scaled = _min_p(logits / _column(rows, "temperature", logits), rows)
    if scaled.device.type == "cpu" and scaled.dtype == torch.float32:
        return [_draw(x, key) for x, key in zip(scaled, _row_keys(rows), strict=True)]
    noise = gumbel(_keys(rows, logits.device), torch.arange(logits.shape[1], device=logits.device))
    return argmax(scaled + noise)


def _draw(scaled: torch.Tensor, key: tuple[int, int]) -> int:
    """The same for one row (V,), where noise takes long to make: only for tokens that could still be the one."""
    most = scaled.numpy() + ceiling(key, len(scaled))
    first = int(most.argmax())
    found = np.flatnonzero(most >= float(scaled[first]) + one(key, first) - SLACK)
    if len(found) < 2:  # none: it is no number
        return first
    ids = torch.from_numpy(found)
    return int(ids[argmax(scaled[ids] + gumbel(torch.tensor([key]), ids))[0]])


def _pick_short(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    values, ids = _truncate(logits / _column(rows, "temperature", logits), rows)
    best = argmax(values + gumbel(_keys(rows, logits.device), ids))
    return ids[torch.arange(len(rows)), best].tolist()


def _truncate(scaled: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted values (R, k) with -inf where a token is cut, and their token ids (R, k). Of equal values the lower id leads.

    A short list is tried first. It will not do where it does not hold the mass, or where what is kept reaches its last value:
    tokens outside may have that value too, and the choice must not depend on who shares the call.
    """
    size = scaled.shape[1]
    k = min(SHORTLIST, size)
    if any(r.request.params.typical_p < 1 for r in rows) or max(r.request.params.top_k for r in rows) > k:
        k = size
    values, ids = _sorted(scaled, k)
    kept = _cut(values, scaled, rows)
    if k < size and (not _covers(values, scaled, rows) or bool((kept == values[:, -1:]).any())):
        values, ids = _sorted(scaled, size)
        kept = _cut(values, scaled, rows)
    return kept, ids


def _cut(values: torch.Tensor, scaled: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """top-k, top-p, min-p and typical-p over sorted values."""
    values = _top_k(values, rows)
    values = _top_p(values, scaled.logsumexp(-1, keepdim=True), rows)
    values = _min_p(values, rows)
    return _typical_p(values, rows)


def _sorted(scaled: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values, and their ids; of equal ones the lower id first, which topk alone does not promise."""
    if k == scaled.shape[1]:
        return scaled.sort(dim=-1, descending=True, stable=True)
    ids = scaled.topk(k, dim=-1).indices.sort(dim=-1).values
    values, order = scaled.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _covers(values: torch.Tensor, scaled: torch.Tensor, rows: Sequence[Row]) -> bool:
    """Does the short list hold every token that top-k and top-p can keep?"""
    mass = (values.logsumexp(-1) - scaled.logsumexp(-1)).exp().tolist()
    return all(
        0 < r.request.params.top_k <= values.shape[1] or m > r.request.params.top_p + 1e-6
        for m, r in zip(mass, rows, strict=True)
    )


def _top_k(values: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    limits = [r.request.params.top_k if r.request.params.top_k > 0 else values.shape[1] for r in rows]
    if min(limits) >= values.shape[1]:
        return values
    rank = torch.arange(values.shape[1], device=values.device)
    return values.masked_fill(rank >= torch.tensor(limits, device=values.device)[:, None], -torch.inf)


def _top_p(values: torch.Tensor, total: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Keep the smallest head of the sorted row that holds top_p of the mass (what top-k left of it)."""
    if all(r.request.params.top_p >= 1 for r in rows):
        return values
    cut = torch.tensor([[r.request.params.top_k > 0] for r in rows], device=values.device)
    total = torch.where(cut, values.logsumexp(-1, keepdim=True), total)
    p = (values - total).exp()
    before = p.cumsum(-1) - p
    top_p = _column(rows, "top_p", values)
    return values.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)


def _min_p(values: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Cut tokens below min_p times the likeliest one. Works sorted or not."""
    if all(r.request.params.min_p <= 0 for r in rows):
        return values
    floor = values.amax(-1, keepdim=True) + _column(rows, "min_p", values).log()
    return values.masked_fill(values < floor, -torch.inf)


def _typical_p(values: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Keep the tokens whose surprise is nearest to the entropy until they hold typical_p of the mass."""
    if all(r.request.params.typical_p >= 1 for r in rows):
        return values
    logp = values.log_softmax(-1)
    p = logp.exp()
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1, keepdim=True)
    order = (entropy + logp).abs().sort(dim=-1, stable=True).indices
    mass = p.gather(-1, order).cumsum(-1)
    typical = _column(rows, "typical_p", values)
    before = mass - p.gather(-1, order)
    cut = (before >= typical) & (typical < 1)
    return values.masked_fill(torch.zeros_like(cut).scatter_(-1, order, cut), -torch.inf)


# ------------------------------------------------------------------ logprobs
def logprobs(logits: torch.Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    """log p of each row's token and of its k likeliest, from raw logits (R, V)."""
    logp = logits.float().log_softmax(-1)
    chosen = logp[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long, device=logp.device)].tolist()
    best = logp.topk(min(k, logp.shape[1]), dim=-1) if k else None
    out = []
    for i, (token, value) in enumerate(zip(tokens, chosen, strict=True)):
        top = {} if best is None else dict(zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True))
        out.append(TokenLogprobs(token, value, top))
    return out
