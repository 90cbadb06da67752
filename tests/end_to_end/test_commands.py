"""The `stemma` commands, as a user types them. What loads no engine runs in the test's process, but
for one of each kind: a process takes a second or more only to begin."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.__main__ import main

EXAMPLES = Path(st.__file__).parent / "examples"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """`stemma_command` in the test's process."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        status = main(args)
        told = capsys.readouterr()
        return subprocess.CompletedProcess(args, status, told.out, told.err)

    return run


def test_demo_runs_and_the_agent_is_right(stemma_command: Run) -> None:
    done = stemma_command("demo", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert len(report["parts"]) == 5
    agent = report["parts"][0]
    assert agent["num_right"] == agent["num_checked"] >= 5
    guesses = report["drafts"]["sources"]["model"]  # of the draft that comes with the model
    assert guesses["accepted_tokens"] > guesses["drafted_tokens"] / 4 > 0
    assert report["total_s"] < 60 * 3  # the bound is 60 s; slack for a busy machine
    assert any("second question on: 9" in line or "second question on: 8" in line
               for line in agent["lines"])  # fmt: skip


def test_generate_prints_text_and_json(stemma_command: Run, served: Any) -> None:
    flags = ("--endpoint", served.endpoint, "--temperature", "0")
    done = stemma_command("generate", "Hi, my name is Nora.", *flags)
    assert done.returncode == 0 and "Nora" in done.stdout, done.stderr
    done = stemma_command("generate", "-", "--raw", "--json", *flags, stdin="Hello")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] >= 2


def test_generate_takes_bias_penalties_and_several_answers(command: Run, served: Any) -> None:
    flags = ["--endpoint", served.endpoint, "--raw", "--seed", "4", "--temperature", "4"]
    flags += ["--max-tokens", "6", "--min-p", "0.001", "--repetition-penalty", "1.1"]
    one = command("generate", "The ", *flags, "--json")
    three = command("generate", "The ", *flags, "--n", "3", "--json")
    assert one.returncode == three.returncode == 0, one.stderr + three.stderr
    samples = [sample["text"] for sample in json.loads(three.stdout)["samples"]]
    assert samples[0] == json.loads(one.stdout)["text"] and len(set(samples)) == 3
    shown = command("generate", "The ", *flags, "--n", "3")
    assert shown.stdout == "".join(f"[{i}] {text}\n" for i, text in enumerate(samples, 1))
    forced = command("generate", "The ", *flags, "--logit-bias", "65=100", "--json")
    text = json.loads(forced.stdout)["text"]
    assert text and text == text[: len(text) // 6] * 6, "six times the same token"


def test_generate_obeys_a_regex_a_schema_and_a_grammar(
    command: Run, served: Any, tmp_path: Path
) -> None:
    def generate(*flags: str) -> str:
        done = command("generate", "Hello", *flags, "--endpoint", served.endpoint)
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    assert re.fullmatch("[0-9]{4}", generate("--regex", "[0-9]{4}"))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    assert json.loads(generate("--json-schema", str(tmp_path / "schema.json")))["a"] in (1, 2)
    (tmp_path / "grammar.lark").write_text('start: "(" inner ")"\ninner: "x" | "(y)"')
    assert generate("--ebnf", str(tmp_path / "grammar.lark")) in ("(x)", "((y))")
    refused = command("generate", "x", "--regex", "(", "--endpoint", served.endpoint)
    assert refused.returncode == 1 and "not closed" in refused.stderr


def test_run_runs_the_only_program_of_a_file(command: Run, served: Any) -> None:
    fields = "fields=name, age"
    text = "text=Anna Berg is 34 years old. She lives in Lisbon."
    done = command(
        "run", str(EXAMPLES / "extract.py"), "--arg", fields, "--arg", text, "--json",
        "--endpoint", served.endpoint,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(json.loads(done.stdout)["values"]["json"])["name"] == "Anna Berg"


def test_run_shows_what_a_program_returns_and_where_it_raises(
    capsys: pytest.CaptureFixture[str], served: Any, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        f"import stemma as st\n\n@st.function(cache={str(tmp_path / 'kept')!r})\n"
        "def main(s, number):\n    s += 'text'\n"
        "    return {'half': 1 / number}\n"
    )
    run = ["run", str(file), "--endpoint", served.endpoint, "--arg"]
    assert main([*run, "number=2"]) == 0
    assert capsys.readouterr().out == "text\nreturned: {'half': 0.5}\n"
    assert main([*run, "number=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["returned"] == {"half": 0.5}
    assert main([*run, "number=0"]) == 1
    told = capsys.readouterr().err
    assert told.count("  File ") == 1 and "line 6, in main" in told
    assert told.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("run", "no_such_file.py"), "no_such_file.py"),
        (("run", str(EXAMPLES / "chat.py"), "--function", "nope"), "chat"),
        (("run", str(EXAMPLES / "chat.py"), "--arg", "novalue"), "NAME=VALUE"),
        (("run", str(EXAMPLES / "extract.py")), "missing a required argument: "),
        (("run", str(EXAMPLES / "extract.py"), "--arg", "txt=a"), "NAME=VALUE: txt"),
        (("trace", "--run", str(EXAMPLES / "extract.py"), "--arg", "x=1"), "extract(fields: str"),
        (("generate", "x", "--model", "/no/such/folder"), "/no/such/folder"),
        (("generate", "x", "--page-size", "0"), "page_size"),
        (("generate", "x", "--logit-bias", "65:3"), "ID=BIAS"),
        (("serve", "--host", "0.0.0.0"), "host"),
        (("serve", "--port", "99999999"), "port"),
        (("tree", "--endpoint", "ftp://x"), "endpoint"),
    ],
)
def test_a_mistake_is_one_clear_line_and_status_1(
    capfd: pytest.CaptureFixture[str], args: tuple[str, ...], word: str
) -> None:
    assert main(list(args)) == 1
    told = capfd.readouterr().err
    assert word in told and "Traceback" not in told


@pytest.mark.parametrize(
    "command", ["", "demo", "run", "chat", "generate", "serve", "tree", "doctor"]
)
def test_help_is_there(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*filter(None, [command]), "--help"])
    assert ended.value.code == 0 and "usage: stemma" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["stemma.cli.parser", "stemma.cli.serve", "fastapi"])
def test_ctrl_c_while_a_command_loads_is_no_traceback(module: str) -> None:
    script = f"""if True:
        import os, signal, sys
        from stemma.__main__ import main

        class Finder:
            def find_spec(self, name, *_):
                if name == "{module}":
                    os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        sys.meta_path.insert(0, Finder())
        raise SystemExit(main(["serve", "--port", "0"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_tree_shows_a_running_servers_tree(command: Run, served: Any) -> None:
    with st.Runtime(served.endpoint) as runtime:
        assert runtime.get_server_info()["model"] == "stemma-tiny"
    command("generate", "Hi, my name is Nora.", "--endpoint", served.endpoint)
    done = command("tree", "--endpoint", served.endpoint)
    assert "Nora" in done.stdout and "tokens cached" in done.stdout
    data = json.loads(command("tree", "--json", "--endpoint", served.endpoint).stdout)
    assert data["cached_tokens"] == sum(node["num_tokens"] for node in data["nodes"])


def test_doctor_finds_no_problem(stemma_command: Run) -> None:
    report = json.loads(stemma_command("doctor", "--json").stdout)
    assert report["problems"] == [] and report["kernels"]


def test_doctor_says_what_a_gpu_lacks_and_fails_where_one_was_asked_for(
    stemma_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    done = stemma_command("doctor", "--device", "cuda", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["gpus"] == report["kernels"] == []
    assert "CUDA" in report["missing_for_gpu"][0] and "CUDA" in report["problems"][0]


def test_doctor_names_what_a_gpus_ops_run_and_why(
    stemma_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    report = json.loads(stemma_command("doctor", "--device", "cuda", "--json").stdout)
    assert report["problems"] == [] and report["dtype"] == "float32"
    chosen = {row["op"]: row["implementation"] for row in report["kernels"]}
    by_torch = {op for op, implementation in chosen.items() if implementation == "torch"}
    assert by_torch == {
        "linear", "scale_in_place", "add_in_place", "join_columns", "gather_share", "select_keys"
    }  # fmt: skip
    assert chosen.pop("observe") == "reference"  # KV policies are a CPU's
    assert {chosen[op] for op in chosen.keys() - by_torch} == {"triton"}
    assert {"paged_attention", "latent_attention", "sample", "experts"} <= chosen.keys()
    assert all(row["reason"] for row in report["kernels"])


def test_chat_remembers_and_resets(stemma_command: Run, served: Any) -> None:
    lines = "Hi, my name is Nora.\nWhat is my name?\n/help\n/reset\nWhat is my name?\n/exit\n"
    done = stemma_command(
        "chat", "--endpoint", served.endpoint, "--temperature", "0", "--stats", stdin=lines
    )
    answers = done.stdout.split("> ")
    assert "Nora" in answers[2] and "Nora" not in answers[5], done.stdout
    assert "cached" in done.stderr and "/reset" in done.stderr


def test_ctrl_c_stops_the_answer_and_not_the_chat(served: Any, tmp_path: Path) -> None:
    """In a real terminal: interrupt a very long answer, then go on."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "stemma", "chat", "--endpoint", served.endpoint]
    command += ["--temperature", "1.5", "--max-tokens", "1500"]
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, start_new_session=True, cwd=tmp_path
    )
    os.close(child)
    try:
        _read_until(parent, b"> ")
        os.write(parent, b"Tell me everything.\n")
        _read_until(parent, b"everything.\r\n")
        process.send_signal(signal.SIGINT)
        _read_until(parent, b"> ")
        os.write(parent, b"/exit\n")
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def _read_until(descriptor: int, wanted: bytes, timeout_s: float = 120) -> bytes:
    read, deadline = b"", time.monotonic() + timeout_s
    while wanted not in read:
        assert time.monotonic() < deadline, read
        read += os.read(descriptor, 4096)
    return read
