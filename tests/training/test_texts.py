"""What is learnt from what programs and a model have written."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from stemma.training.texts import Text, recorded_texts, split


class Request:
    """What is recorded of one."""

    def __init__(self, program: object, prompt: list[int], output: list[int]) -> None:
        self.program, self.prompt, self.output_ids = program, array("i", prompt), output
        self.images = ()


def test_a_call_that_goes_on_with_another_is_one_text_with_it() -> None:
    one, two = object(), object()
    first, second = Request(one, [1, 2], [3, 4, 5]), Request(one, [1, 2, 3, 4, 5, 6], [7, 8])
    branch = Request(one, [1, 2, 3, 4, 5, 9], [7, 8])
    other = Request(two, [0], [1, 2, 3])
    requests = [second, other, first, branch]
    recorder: Any = SimpleNamespace(requests=requests, forced={first: {1}})
    long = Text((1, 2, 3, 4, 5, 6, 7, 8), (*[False] * 4, True, *[False] * 2, True))
    branched = Text((1, 2, 3, 4, 5, 9, 7, 8), (*[False] * 7, True))
    short = Text((0, 1, 2, 3), (False, False, True, True))
    assert recorded_texts(recorder) == [[short], [long, branched]]


def test_windows_hold_each_guess_once_behind_half_a_window() -> None:
    text = Text(tuple(range(100)), tuple(i % 7 == 0 for i in range(100)))
    seen: list[int] = []
    for start, window in text.windows(16):
        assert window.token_ids == tuple(range(start, min(start + 16, 100)))
        places = [place for place, is_it in enumerate(window.is_guessed) if is_it]
        assert start == 0 or min(places) >= 8
        seen += [window.token_ids[place] for place in places]
    assert seen == [*range(0, 100, 7)]


def test_no_program_is_both_learnt_from_and_held_out() -> None:
    programs = [[Text((number,), (True,))] * 2 for number in range(10)]
    learnt, held = split(programs, 0.3, 5)
    assert len(held) == 6 and len(learnt) == 14
    assert not {text.token_ids for text in learnt} & {text.token_ids for text in held}
    for share in (0.01, 0.99):
        assert [len(part) for part in split(programs[:2], share, 0)] == [2, 2]
