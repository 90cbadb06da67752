"""What a process has started, and what that has started, ended with it (Linux).

A subreaper (prctl(2)) becomes the parent of descendants whose own parent has died: so all that a
benchmark and its peers start stays below it in the process tree, in sessions of their own or not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType

from .process_meter import has_ended, process_tree

INTERRUPTS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 0.75  # from the signal on: to remove files and end children of their own
_KILL_S = 10.0  # a killed process has gone by then on any machine, unless the kernel holds it
_LOOK_S = 0.01
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@contextlib.contextmanager
def ending_descendants() -> Iterator[None]:
    """When the block ends, all that was started in it has ended too. In the main thread, the first
    SIGTERM or SIGINT raises KeyboardInterrupt there, and descendants get SIGTERM; those that live
    GRACE_S later are killed. More signals change nothing."""
    spared = process_tree(os.getpid())[1:]
    become_subreaper()
    with _interrupts(spared):
        try:
            yield
        finally:
            _ignore_interrupts()
            end_descendants(spared)
            become_subreaper(False)


def become_subreaper(is_one: bool = True) -> None:
    """Have orphans of this process's descendants become its children, or no longer."""
    _prctl(_SET_CHILD_SUBREAPER, is_one)


def end_with_parent() -> None:
    """Get SIGTERM when this process's parent ends, however that ends."""
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)


def end_descendants(spared: Iterable[int] = ()) -> None:
    """Kill all descendants, but the trees of those spared, and wait until they have ended."""
    deadline = time.monotonic() + _KILL_S
    while (living := _living(spared)) and time.monotonic() < deadline:
        for pid in living:
            _signal(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def kill_tree(pid: int) -> None:
    """Kill a child of this process that was not waited for, and its descendants."""
    for each in process_tree(pid):
        _signal(each, signal.SIGKILL)


@contextlib.contextmanager
def killing_after(seconds: float, doomed: Iterable[int]) -> Iterator[None]:
    """Kill these descendants, and theirs, if the block takes that long."""
    timer = threading.Timer(seconds, _kill, [list(doomed)])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill(doomed: list[int]) -> None:
    """Those of them that are still below this process."""
    for pid in set(doomed).intersection(_living()):
        kill_tree(pid)


def _living(spared: Iterable[int] = ()) -> list[int]:
    """Descendants that have not ended, parents first, without the trees of those spared."""
    kept = {each for pid in spared for each in process_tree(pid)}
    return [pid for pid in process_tree(os.getpid())[1:] if pid not in kept and not has_ended(pid)]


@contextlib.contextmanager
def _interrupts(spared: Iterable[int]) -> Iterator[None]:
    """Handles them in the main thread; elsewhere Python handles no signals."""
    own = os.getpid()
    with contextlib.ExitStack() as stack:

        def interrupt(number: int, frame: FrameType | None) -> None:
            if os.getpid() != own:  # a fork, which has this handler too
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
                return
            _ignore_interrupts()
            doomed = _living(spared)
            for pid in doomed:
                _signal(pid, signal.SIGTERM)
            stack.enter_context(killing_after(GRACE_S, doomed))
            raise KeyboardInterrupt

        if _is_main_thread():
            for each in INTERRUPTS:
                stack.callback(signal.signal, each, signal.signal(each, interrupt))
        yield


def _ignore_interrupts() -> None:
    if _is_main_thread():
        for each in INTERRUPTS:
            signal.signal(each, signal.SIG_IGN)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value)):
        raise OSError(ctypes.get_errno(), "prctl")
