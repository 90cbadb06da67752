"""Observers of all programs of this process, notified when one begins and when one has ended.

Independent of what an observer does. Without observers a program pays one truth test.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from ...errors import MissingDependency

if TYPE_CHECKING:
    from ..client.program import Program

log = logging.getLogger("stemma.trace")

OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Observer(Protocol):
    """Observes programs; its methods must not block and must not raise."""

    def program_started(self, program: Program) -> None:
        """On the author's thread, before the first op."""

    def program_ended(self, program: Program) -> None:
        """Exactly once: it is done, was cancelled or lost its runtime. On any thread."""


class ProgramRecorder:
    """Keeps every program that starts while it observes, in their order."""

    def __init__(self) -> None:
        self.programs: list[Program] = []

    def program_started(self, program: Program) -> None:
        self.programs.append(program)

    def program_ended(self, program: Program) -> None:
        """No effect: the results are in the program."""


_lock = threading.Lock()
_observers: tuple[Observer, ...] = ()
_is_environment_read = False


def program_started(program: Program) -> None:
    """Must be called for every program that is to run, before its first op."""
    if not _is_environment_read:
        _read_environment()
    if _observers:
        program.on_end = program_ended
    for observer in _observers:
        observer.program_started(program)


def program_ended(program: Program) -> None:
    """An observed program has ended; only the first call for a program counts."""
    with _lock:
        is_first, program.on_end = program.on_end is not None, None
    if not is_first:
        return
    for observer in _observers:
        observer.program_ended(program)


def add_observer(observer: Observer) -> None:
    """From now on, notify it of programs that start."""
    global _observers
    with _lock:
        _observers = (*_observers, observer)


def remove_observer(observer: Observer) -> None:
    """No effect if it is not registered."""
    global _observers
    with _lock:
        _observers = tuple(known for known in _observers if known is not observer)


@contextlib.contextmanager
def recorded_programs() -> Iterator[list[Program]]:
    """The programs that start within the block, on any thread; the list grows as they start."""
    recorder = ProgramRecorder()
    add_observer(recorder)
    try:
        yield recorder.programs
    finally:
        remove_observer(recorder)


def _read_environment() -> None:
    """Export spans where OpenTelemetry's own variables name an endpoint; checked once."""
    global _is_environment_read
    with _lock:
        if _is_environment_read:
            return
        _is_environment_read = True
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not is_disabled and any(os.environ.get(name) for name in OTLP_VARIABLES):
        try:
            from .otel import exporter_from_environment
        except MissingDependency as error:
            log.warning("%s", error)
            return
        add_observer(exporter_from_environment())
