"""Which images are encoded in which step, which features stay, and who hears of a failure."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from fakes import FakeListener

from stemma.runtime.images.image import Image, spans_of
from stemma.runtime.schedule.image_encodings import ImageEncodings
from stemma.runtime.schedule.image_rows import image_parts
from stemma.runtime.schedule.plan import ImagePart
from stemma.runtime.schedule.request import Request, RequestState
from stemma.runtime.schedule.sampling_params import SamplingParams

ONE, TWO, WIDE = (
    Image(-key, grid, 2, b"", lambda _: np.zeros((0, 0), np.float32))
    for key, grid in ((1, (4, 4)), (2, (4, 4)), (3, (2, 20)))
)
IMAGES = {image.token_id: image for image in (ONE, TWO, WIDE)}


def request_of(*parts: Image | int) -> Request:
    """It runs; numbers are texts of so many tokens."""
    ids = array("i")
    for part in parts:
        ids.extend([9] * part if isinstance(part, int) else [part.token_id] * part.num_tokens)
    request = Request(1, ids, SamplingParams(), FakeListener())
    request.images = spans_of(ids, IMAGES.__getitem__)
    request.state = RequestState.RUNNING
    return request


def encodings(max_tokens: int = 1000) -> ImageEncodings:
    return ImageEncodings(max_bytes=8 * max_tokens, num_blocks=4, bytes_per_token=8)


def test_a_chunk_ends_before_an_image_until_it_is_encoded_a_few_blocks_a_step() -> None:
    images, request = encodings(), request_of(3, ONE, 2, TWO)
    steps = []
    for _ in range(2):
        images.begin_step()
        assert images.computable(request, 20) == 3
        steps.append([(part.key, part.num_blocks) for part in images.take(32)[1]])
    assert steps == [[(-1, 2)], [(-1, 2)]]
    images.begin_step()
    assert images.computable(request, 20) == 3 + 4 + 2
    assert images.computable(request, 5) == 5


def test_a_step_without_room_for_a_block_encodes_one_of_one_image() -> None:
    images, request = encodings(), request_of(ONE, TWO)
    other = request_of(TWO)
    images.begin_step()
    assert images.computable(request, 9) == images.computable(other, 9) == 0
    (part,) = images.take(0)[1]
    assert (part.key, part.num_blocks, part.source) == (-1, 1, ONE)
    (part,) = images.take(-5)[1]
    assert (part.key, part.num_blocks, part.source) == (-1, 1, None)


def test_an_image_is_encoded_once_for_all_who_ask() -> None:
    images, requests = encodings(), [request_of(n, ONE) for n in (1, 2, 3)]
    images.begin_step()
    assert [images.computable(request, 9) for request in requests] == [1, 2, 3]
    assert len(images.take(1000)[1]) == 1
    images.begin_step()
    assert [images.computable(request, 5) for request in requests] == [5, 5, 5]
    assert images.take(1000) == ((), ()) and images.describe()["encoded"] == 1


def test_features_stay_while_they_are_needed_and_then_while_there_is_room() -> None:
    images, first, second = encodings(max_tokens=9), request_of(ONE), request_of(WIDE)
    images.begin_step()
    images.computable(first, 9)
    images.take(1000)
    images.begin_step()
    assert images.computable(second, 20) == 0
    assert images.take(1000) == ((), ())  # no room: the first one needs its own
    first.num_scheduled_tokens = 4
    images.begin_step()
    images.computable(second, 20)
    dropped, slices = images.take(1000)
    assert dropped == (-1,) and [part.key for part in slices] == [-3]  # alone it may have more
    second.state = RequestState.WAITING
    images.begin_step()
    images.computable(request_of(TWO), 9)
    assert images.take(1000)[0] == (-3,)


def test_an_image_that_nobody_waits_for_is_not_encoded_further_until_somebody_does() -> None:
    images, gone = encodings(), request_of(3, ONE)
    images.begin_step()
    images.computable(gone, 9)
    assert [part.num_blocks for part in images.take(16)[1]] == [1]
    gone.state = RequestState.FINISHED
    images.begin_step()
    assert images.take(1000) == ((), ())
    assert images.computable(request_of(ONE), 4) == 0
    assert [(part.num_blocks, part.source) for part in images.take(1000)[1]] == [(3, None)]


def test_those_who_need_an_image_hear_of_its_failure() -> None:
    images, request, other = encodings(), request_of(ONE), request_of(TWO)
    images.begin_step()
    images.computable(request, 9)
    images.computable(other, 9)
    images.take(1000)
    images.begin_step()
    images.computable(request, 9)
    assert images.fail(-1) == [request] and images.fail(-1) == ()
    images.reset()
    assert images.take(1000) == ((-2,), ())


@pytest.mark.parametrize("start", range(15))
def test_parts_of_a_row_say_what_the_whole_says(start: int) -> None:
    request = request_of(3, ONE, 2, TWO, 2)
    for end in range(start + 1, 16):
        shift, parts = image_parts(request.images, start, end)
        found = []
        for place in range(start, end):
            inside = [p for p in parts if p.start <= place - start < p.start + p.length]
            behind = [p for p in parts if p.start + p.length <= place - start]
            if inside:
                found.append(_position(inside[0], place - start))
            else:
                found.append((place + (behind[-1].rope_shift if behind else shift),) * 3)
        assert found == WHOLE[start:end]


def _position(part: ImagePart, place: int) -> tuple[int, int, int]:
    row, column = divmod(part.first + place - part.start, part.columns)
    return part.base, part.base + row, part.base + column


WHOLE = [
    (0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (3, 3, 4), (3, 4, 3), (3, 4, 4), (5, 5, 5),
    (6, 6, 6), (7, 7, 7), (7, 7, 8), (7, 8, 7), (7, 8, 8), (9, 9, 9), (10, 10, 10),
]  # fmt: skip
