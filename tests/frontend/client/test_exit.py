"""What a script leaves behind at a runtime that others use, too: nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from waiting import wait_until

import stemma as st
from stemma.frontend.client.engine_process import EngineProcess

SCRIPT = """
import sys
import stemma as st

@st.function
def endless(s):
    s += "Count: " + st.gen("x", max_tokens=1900, ignore_eos=True)

runtime = st.Runtime(sys.argv[1])
state = endless.stream(backend=runtime)
next(state.text_iter("x"))
print("running", flush=True)
END
"""


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "sys.exit(3)", "raise LookupError"])
def test_a_script_that_ends_takes_its_programs_along(end: str) -> None:
    """At once, not when the runtime gives it up as lost (600 s here)."""
    process = EngineProcess(None, options={"grace_s": 600, "num_threads": 1})
    try:
        with st.Runtime(str(process.endpoint), timeout_s=120) as runtime:
            command = [sys.executable, "-c", SCRIPT.replace("END", end), str(process.endpoint)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            assert "running" in ended.stdout and ended.returncode
            wait_until(lambda: runtime.get_server_info()["num_clients"] == 1)
            assert runtime.get_server_info()["num_programs"] == 0
    finally:
        process.stop()
