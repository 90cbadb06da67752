from __future__ import annotations

import pytest

from stemma.bench.cache.kv_tasks import TASKS


@pytest.mark.parametrize("task", sorted(TASKS))
def test_what_is_asked_for_is_in_the_own_text_alone(task: str) -> None:
    cases = TASKS[task](40, 5)
    assert cases == TASKS[task](40, 5), "cases are the same in each run"
    places = set()
    for case in cases:
        own, others = case.own + case.questions[0], case.before + case.after
        places.add((bool(case.before), bool(case.after)))
        for index, answer in enumerate(case.answers):
            assert case.is_right(index, answer)
            assert not case.is_right(index, answer + "0")
            if task != "extract":
                name = case.questions[index].removeprefix("What is ").removesuffix("?")
                assert f"{name}: {answer}" in own
                assert name not in others
    assert len(cases) == 40 and len(places) == (1 if task == "extract" else 3)
