"""Each example runs as it stands, on the embedded model, and says what it promises."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import stemma as st

EXAMPLES = Path(st.__file__).parent / "examples"
EXPECTED = {
    "agent.py": ("-> 816", "-> 16450", "prompt tokens cached"),
    "extract.py": ("'name': 'Anna Berg'", "'age': 34", "'quantity': 3", "'city': 'Porto'"),
    "chat.py": ("Nora", "Bergen"),
    "tools.py": ('calls get_weather {"city":"Oslo"}', "48 times 17 is 816", "How can I help"),
    "fork_join.py": ('"name":"Clara Voss"', '"job":"pilot"', '"hobby":"chess"', "cached)"),
}


def test_every_example_has_a_test_and_is_short() -> None:
    files = {path.name: path for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(EXPECTED)
    for path in files.values():
        assert len(path.read_text().splitlines()) <= 62, path


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example_prints_what_it_promises(
    name: str, embedded: st.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    st.set_default_backend(embedded)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        st.set_default_backend(None)
    printed = capsys.readouterr().out
    for expected in EXPECTED[name]:
        assert expected in printed, printed
