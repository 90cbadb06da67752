"""Gradient training of a draft, and how often its guesses are right."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .drafts import NUM_PLACES, Batch, Draft, EagleDraft
from .target import Target
from .texts import Text

_FADE = 0.8  # of a pass's weight to that of the next one's
_FEATURES = 1.0  # weight of the distance of hidden states, of what is 1 for that of distributions
_BATCH_TOKENS = 1024
_LOGITS = 2**25  # of a batch's guesses: 128 MiB
_WARM_UP = 0.05  # of all steps
_LEARNING_RATE = 2e-3

Progress = Callable[[int, float], None]  # (steps done, loss)


@dataclass(frozen=True, slots=True)
class Learnt:
    """A window of a text, and the model's hidden states in its own dtype."""

    text: Text
    hidden: Tensor  # [1 + T, hidden_size]; the first: of the token before it, or zeros


def learnt(target: Target, texts: Sequence[Text]) -> list[Learnt]:
    """All windows of the texts in which something was guessed."""
    found = []
    for text in texts:
        windows = [*text.windows()]
        if windows:
            hidden = F.pad(target.hidden(text.token_ids), (0, 0, 1, 0))
            found += [
                Learnt(window, hidden[start : start + len(window.token_ids) + 1].clone())
                for start, window in windows
            ]
    return found


def train(
    draft: Draft,
    target: Target,
    windows: Sequence[Learnt],
    *,
    num_steps: int,
    seconds: float | None,
    seed: int,
    on_step: Progress,
) -> int:
    """Teach the draft what the model would say, for so many steps of a batch, or so long if that is
    less. How many steps were done."""
    optimizer = torch.optim.AdamW(draft.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    started, done, rng = time.monotonic(), 0, random.Random(seed)
    while True:
        batches = _batches(windows, target.config.vocab_size)
        rng.shuffle(batches)
        for batch in batches:
            share = done / num_steps
            if seconds is not None:
                share = max(share, (time.monotonic() - started) / seconds)
            if share >= 1.0:
                return done
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * min(share / _WARM_UP + 0.02, 1.0 - share)
            loss = _loss(draft, target, padded(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            on_step(done, loss.item())


@torch.no_grad()
def acceptance(draft: Draft, target: Target, windows: Sequence[Learnt]) -> list[float | None]:
    """Of guesses at each place of a draft, the share that is what followed, where all before it
    are; None: there was none. A guess is the token that the draft takes for the likeliest."""
    right, seen = [0] * NUM_PLACES, [0] * NUM_PLACES
    for windows_of_batch in _batches(windows, target.config.vocab_size):
        batch = padded(windows_of_batch)
        is_wanted = _next(batch.is_guessed)
        was_right = torch.ones_like(is_wanted)
        for place, hidden in enumerate(draft.passes(batch, NUM_PLACES)):
            is_seen = is_wanted & was_right
            is_right = torch.zeros_like(is_seen)
            guesses = draft.logits(hidden[is_seen], place).argmax(-1)
            is_right[is_seen] = guesses == _next(batch.token_ids)[is_seen]
            seen[place] += int(is_seen.sum())
            right[place] += int(is_right.sum())
            was_right = F.pad(is_right, (1, 0))[:, :-1]
    return [a / b if b else None for a, b in zip(right, seen, strict=True)]


def _loss(draft: Draft, target: Target, batch: Batch) -> Tensor:
    """The mean over passes and guesses of the cross-entropy between both distributions, and, where
    the draft's hidden states are to be the model's, of the distance between them (EAGLE, 4.1)."""
    is_wanted = _next(batch.is_guessed)
    states = batch.hidden[is_wanted]
    with torch.no_grad():
        said = target.logits(states).softmax(-1)
    total, weight, sum_of_weights = torch.zeros(()), 1.0, 0.0
    for place, hidden in enumerate(draft.passes(batch, draft.num_trained)):
        guessed = hidden[is_wanted]
        loss = -(said * draft.logits(guessed, place).log_softmax(-1)).sum(-1).mean()
        if isinstance(draft, EagleDraft):
            loss = loss + _FEATURES * F.smooth_l1_loss(guessed, states)
        total = total + weight * loss
        sum_of_weights += weight
        weight *= _FADE
    return total / sum_of_weights


def _batches(windows: Sequence[Learnt], vocab_size: int) -> list[list[Learnt]]:
    """Of windows of like lengths."""
    batches: list[list[Learnt]] = []
    num_guessed = 0
    for window in sorted(windows, key=lambda window: len(window.text.token_ids)):
        size = len(window.text.token_ids)
        num_guessed += window.text.num_guessed
        is_full = not batches or (len(batches[-1]) + 1) * size > _BATCH_TOKENS
        if is_full or num_guessed * vocab_size > _LOGITS:
            batches.append([])
            num_guessed = window.text.num_guessed
        batches[-1].append(window)
    return batches


def padded(windows: Sequence[Learnt]) -> Batch:
    length = max(len(window.text.token_ids) for window in windows)
    size = windows[0].hidden.shape[1]
    token_ids = torch.zeros(len(windows), length, dtype=torch.int64)
    is_guessed = torch.zeros(len(windows), length, dtype=torch.bool)
    hidden = torch.zeros(len(windows), length + 1, size)
    for index, window in enumerate(windows):
        num = len(window.text.token_ids)
        token_ids[index, :num] = torch.tensor(window.text.token_ids)
        is_guessed[index, :num] = torch.tensor(window.text.is_guessed)
        hidden[index, : num + 1] = window.hidden
    return Batch(token_ids, is_guessed, hidden[:, 1:], hidden[:, :-1])


def _next(x: Tensor) -> Tensor:
    """[B, T]: of each token that of the next; of the last one zero."""
    return F.pad(x, (0, 1))[:, 1:]
