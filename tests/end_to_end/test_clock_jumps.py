"""The date of a server's processes jumps by hours, forwards and back: nothing that waits depends on
it. The jump is real to them: a library in front of libc adds it to every clock that has a date."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

import stemma as st

HOUR_S = 3600
JUMPING_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *jump;

__attribute__((constructor)) static void open_jump(void) {
    const char *path = getenv("CLOCK_JUMP");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    jump = page == MAP_FAILED ? 0 : page;
}
static int64_t jumped(void) { return jump ? *jump : 0; }

int clock_gettime(clockid_t clock, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, out);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) out->tv_sec += jumped();
    return status;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


@st.function
def chain(s: st.ProgramState) -> None:
    s += "Once" + st.gen("x", max_tokens=40, temperature=0, ignore_eos=True)
    s += " and " + st.gen("y", max_tokens=8, temperature=0, regex="[a-z]{3,9}")


def jumping_library(folder: Path) -> Path:
    source, library = folder / "jump.c", folder / "jump.so"
    source.write_text(JUMPING_CLOCK)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True
    )
    return library


def test_a_date_that_jumps_ends_no_request_no_session_and_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jump = tmp_path / "jump"
    jump.write_bytes(struct.pack("q", 0))
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(jumping_library(tmp_path)))
        patch.setenv("CLOCK_JUMP", str(jump))
        flags = ("--engine-timeout-s", "5", "--grace-s", "5", "--dtype", "float32")
        server = ServerProcess(tmp_path / "server", *flags)
    with server, st.Runtime(server.endpoint) as runtime:
        engine, expected = server.engine_pid, chain.run(backend=runtime).text()
        for hours in (12, -12, 24 * 365, 0):
            state = chain.stream(backend=runtime)
            with server.stream(40, temperature=0) as events:
                with jump.open("r+b") as file:  # in place: it is mapped
                    os.pwrite(file.fileno(), struct.pack("q", hours * HOUR_S), 0)
                assert list(events)[-1] == {"done": True}
            assert state.text() == expected
            created = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60
            ).json()
            assert abs(created["created"] - time.time() - hours * HOUR_S) < HOUR_S, "it jumped"
            assert server.status("/health") == 200 and server.engine_pid == engine
