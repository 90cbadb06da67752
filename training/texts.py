"""What programs and a model have written, as texts to learn from. Torch-free."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .recording import Recorder

WINDOW_TOKENS = 1024  # of a text that is learnt from at once; its first half is context alone


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a program and of its calls; `is_guessed`: which of them a draft can have guessed.
    These the model drew, with others of the same output before them."""

    token_ids: tuple[int, ...]
    is_guessed: tuple[bool, ...]

    @property
    def num_guessed(self) -> int:
        return sum(self.is_guessed)

    def windows(self, size: int = WINDOW_TOKENS) -> Iterator[tuple[int, Text]]:
        """Parts of at most `size` tokens with where they begin: each token that was guessed is in
        one of them, behind size / 2 tokens at least, or all there are."""
        step = size // 2
        for start in range(0, max(1, len(self.token_ids) - step), step):
            end = min(start + size, len(self.token_ids))
            fresh = [False] * step if start else []
            guessed = (*fresh, *self.is_guessed[start + len(fresh) : end])
            if any(guessed):
                yield start, Text(self.token_ids[start:end], guessed)


def recorded_texts(recorder: Recorder) -> list[list[Text]]:
    """By program, in an order that does not depend on which ran first. A call that goes on where
    another ended is one text with it; calls with images are left out."""
    calls: dict[int, list[Text]] = {}
    for request in recorder.requests:
        output = request.output_ids
        if not output or request.images:
            continue
        forced = recorder.forced.get(request, set())
        guessed = [place > 0 and place not in forced for place in range(len(output))]
        text = Text((*request.prompt, *output), (*[False] * len(request.prompt), *guessed))
        calls.setdefault(id(request.program), []).append(text)
    return sorted(map(_merged, calls.values()), key=lambda texts: [t.token_ids for t in texts])


def split(programs: Sequence[list[Text]], share: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and those of a share of the programs to measure by; of both at least one
    program's, of at least two programs."""
    order = list(range(len(programs)))
    random.Random(seed).shuffle(order)
    num_held = min(max(1, round(share * len(order))), len(order) - 1)
    held, learnt = sorted(order[:num_held]), sorted(order[num_held:])
    return [t for i in learnt for t in programs[i]], [t for i in held for t in programs[i]]


def _merged(calls: list[Text]) -> list[Text]:
    """Of a program's calls, sorted. NOTE: of two that go on with the same text, as of branches,
    one is merged with it, so that no token counts twice."""
    merged: list[Text] = []
    for call in sorted(calls, key=lambda text: (len(text.token_ids), text.token_ids)):
        for place, text in enumerate(merged):
            length = len(text.token_ids)
            if call.token_ids[:length] == text.token_ids:
                guessed = (*text.is_guessed, *call.is_guessed[length:])
                merged[place] = Text(call.token_ids, guessed)
                break
        else:
            merged.append(call)
    return sorted(merged, key=lambda text: text.token_ids)
