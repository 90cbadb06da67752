"""`stemma trace`, as a user types it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.__main__ import main

EXAMPLES = Path(st.__file__).parent / "examples"
Capture = pytest.CaptureFixture[str]
SCRIPT = """
import stemma as st

@st.function
def first(s, city, num=2):
    s += st.user(f"Tell me about {city}.") + st.assistant(st.gen("answer", max_tokens=4))
    return s["answer"]

@st.function
def second(s):
    forks = s.fork(2)
    forks += st.gen("part", max_tokens=3)
    forks.join()

@st.function
def broken(s, num):
    s.fork(num + 1)

if __name__ == "__main__":
    first.run("Oslo", seed=1)
    second.run(seed=1)
    print("the script's own words")
"""


FAILING = """
import stemma as st

class Wordless(Exception):
    def __str__(self):
        raise LookupError

class Stop(BaseException):
    pass

@st.function
def divides(s):
    s += "x" + st.gen("x")
    1 / 0

@st.function
def leaves(s):
    raise SystemExit(3)

@st.function
def wordless(s):
    raise Wordless

@st.function
async def stops(s):
    raise Stop("here")

@st.function
def last(s):
    s += "y" + st.gen("y")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "two.py"
    file.write_text(SCRIPT)
    return file


def test_it_prints_what_every_program_sends_and_draws_it(
    capsys: Capture, script: Path, tmp_path: Path
) -> None:
    html, svg = tmp_path / "out.html", tmp_path / "out.svg"
    status = main(["trace", str(script), "--html", str(html), "--svg", str(svg)])
    done = capsys.readouterr()
    assert "first: 6 ops, 1 call, 1 branch up to the first wait" in done.out
    assert "second: 6 ops, 2 calls, 3 branches" in done.out
    assert "Tell me about {city}." in done.out and "two.py:6" in done.out
    assert status == 1, "one program could not be captured"
    assert "broken raised TypeError" in done.err and "num" in done.err
    assert "own words" not in done.out, "its main block does not run"
    ElementTree.fromstring(svg.read_text())
    assert svg.read_text().split("\n", 1)[0][:4] == "<svg" and "first" in html.read_text()


def test_one_program_with_arguments_as_data(capsys: Capture, script: Path) -> None:
    flags = ("--function", "first", "--arg", "city=Rome", "--json")
    status = main(["trace", str(script), *flags])
    done = capsys.readouterr()
    assert status == 0, done.err
    (graph,) = json.loads(done.out)
    assert graph["name"] == "first" and "Tell me about Rome." in done.out
    assert graph["wait"]["reading"] == "s['answer']" and "two.py:7" in graph["wait"]["source"]


def test_programs_that_fail_are_named_with_their_lines_and_the_others_listed(
    capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    assert main(["trace", str(file)]) == 1
    done = capsys.readouterr()
    assert "last: 2 ops" in done.out
    divides, leaves, wordless, stops = done.err.splitlines()
    assert "divides raised ZeroDivisionError: division by zero" in divides
    assert divides.endswith("failing.py:14)")
    assert leaves.endswith("leaves: SystemExit: 3")
    assert "Wordless: <exception str() failed>" in wordless
    assert stops.startswith("stemma trace: stops: ") and stops.endswith("Stop: here")


@pytest.mark.parametrize("command", [("trace",), ("trace", "--run"), ("run",)])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("import json\nx = (\n", '  File "{0}", line 2\n    x = (\n        ^\nSyntaxError: '),
        (
            "import json\ndef read():\n    json.loads('')\nread()\n",
            'Traceback (most recent call last):\n  File "{0}", line 4, in <module>\n    read()\n'
            "  File \"{0}\", line 3, in read\n    json.loads('')\n",
        ),
        (
            "raise SystemExit('no')",
            'Traceback (most recent call last):\n  File "{0}", line 1, in <module>\n',
        ),
    ],
    ids=["syntax", "import", "exit"],
)
def test_a_file_that_cannot_be_loaded_is_shown_as_python_shows_it(
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: tuple[str, ...],
    text: str,
    shown: str,
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "bad.py"]) == 1
    error = capsys.readouterr().err
    first, _, rest = error.partition("\n")
    assert first == f"stemma {command[0]}: bad.py cannot be loaded:"
    assert rest.startswith(shown.format(file))
    assert "program_file" not in error and "importlib" not in error


@pytest.mark.parametrize("flags", [("--run",), ("--run", "--script")])
def test_a_run_that_fails_is_shown_from_the_files_own_line_on(
    capsys: Capture, served: Any, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    file = tmp_path / "failing.py"
    file.write_text(
        "import stemma as st\n\n@st.function\ndef main(s):\n    s += 'x'\n    1 / 0\n"
        "\nif __name__ == '__main__':\n    main.run()\n"
    )
    html = tmp_path / "timeline.html"
    command = ["trace", str(file), *flags, "--endpoint", served.endpoint, "--html", str(html)]
    assert main(command) == 1
    error = capsys.readouterr().err
    number = 9 if "--script" in flags else 6
    head = f'{file} failed:\nTraceback (most recent call last):\n  File "{file}", line {number}, in'
    assert f"stemma trace: {head}" in error
    assert error.rstrip().endswith("ZeroDivisionError: division by zero")
    assert html.is_file(), "what was done until then is reported"


def test_run_reports_every_call_and_writes_the_timeline(
    capsys: Capture, served: Any, script: Path, tmp_path: Path
) -> None:
    html = tmp_path / "timeline.html"
    flags = ("--run", "--endpoint", served.endpoint, "--html", str(html), "--seed", "1")
    status = main(["trace", str(script), "--function", "first", "--arg", "city=Rome", *flags])
    done = capsys.readouterr()
    assert status == 0, done.err
    (row,) = [line for line in done.out.splitlines() if "answer*" in line]
    assert "two.py:6" in row and row.split()[0] == "main"
    assert "critical path" in done.out and "programs       1 with 1 calls" in done.out
    assert "answer on main" in html.read_text()
    assert "The radix tree at the end" in html.read_text()


@pytest.mark.parametrize("command", ["run", "trace"])
def test_a_seed_of_the_programs_own_is_left_to_it(
    capsys: Capture, served: Any, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import stemma as st\n\n@st.function\ndef main(s, seed='mine'):\n    s += seed\n"
        "    print('seed:', seed)\n"
    )
    more = ["--run", "--html", str(tmp_path / "timeline.html")] if command == "trace" else []
    assert main([command, str(file), *more, "--endpoint", served.endpoint]) == 0
    given = [*more, "--arg", "seed=theirs", "--seed", "3"]
    assert main([command, str(file), *given, "--endpoint", served.endpoint]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed:")]
    assert lines == ["seed: mine", "seed: theirs"]


def test_script_records_every_program_that_the_file_runs(
    capsys: Capture, served: Any, script: Path, tmp_path: Path
) -> None:
    html = tmp_path / "timeline.html"
    flags = ("--endpoint", served.endpoint, "--html", str(html), "--json")
    status = main(["trace", "--run", "--script", str(script), *flags])
    done = capsys.readouterr()
    assert status == 0, done.err
    report = json.loads(done.out)
    assert [program["name"] for program in report["programs"]] == ["first", "second"]
    assert [call["name"] for call in report["programs"][1]["calls"]] == ["part", "part"]
    assert all(call["prompt_tokens"] > 0 for call in report["programs"][0]["calls"])
    assert "the script's own words" in done.err, "standard output is the data's"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("no_such_file.py",), "no_such_file.py"),
        ((str(EXAMPLES / "chat.py"), "--function", "nope"), "nope"),
        ((str(EXAMPLES / "chat.py"), "--arg", "nope=1"), "nope"),
        ((str(EXAMPLES / "chat.py"), "--script"), "--run"),
        ((str(EXAMPLES / "chat.py"), "--run", "--svg", "x.svg"), "--html"),
        ((str(EXAMPLES / "chat.py"), "--run", "--script", "--arg", "a=1"), "--script"),
        ((str(EXAMPLES / "chat.py"), "--html", "/no/such/folder/x.html"), "/no/such/folder"),
    ],
)
def test_a_mistake_is_one_clear_line(capsys: Capture, args: tuple[str, ...], word: str) -> None:
    assert main(["trace", *args]) == 1
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1


def test_help_names_what_it_takes(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(flag in text for flag in ("--run", "--script", "--html", "--svg", "--arg"))
