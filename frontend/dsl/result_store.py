"""Results on disk, so that what was done is not done again: an SQLite file.

A result is found by what it is a result of: the function's source, its arguments, the run's options
and the model. Values are pickled: open only stores that you trust, as with any pickle.
"""

from __future__ import annotations

import pickle
import secrets
import sqlite3
import threading
import time
from pathlib import Path

from ...errors import InvalidProgram, InvalidRequest
from .result import Result

_TABLES = """
create table if not exists stemma_results(
    key blob primary key, done_at real not null, result blob not null) without rowid;
create table if not exists stemma_seeds(program text primary key, seed integer not null);
"""


class ResultStore:
    """An open file; thread-safe. What was put is on disk when `put` returns.

    Raises InvalidRequest for a file that is none of these. Several processes may share one.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        try:
            self._file = sqlite3.connect(self._path, timeout=60.0, check_same_thread=False)
            self._file.execute("pragma journal_mode=wal")
            self._file.executescript(_TABLES)
        except sqlite3.Error as error:
            allowed = f"a path of a store of results, or of a new one ({error})"
            raise InvalidRequest.of("store", str(path), allowed) from error

    def get(self, key: bytes) -> Result | None:
        """None where there is none that can be read."""
        query = "select result from stemma_results where key = ?"
        with self._lock:
            row = self._file.execute(query, (key,)).fetchone()
        if row is None:
            return None
        try:
            result = pickle.loads(row[0])
        except Exception:  # of a class that has changed: it is made again
            return None
        return result if isinstance(result, Result) else None

    def put(self, key: bytes, result: Result) -> None:
        """Keep a result. Raises InvalidProgram for values that cannot be pickled."""
        try:
            pickled = pickle.dumps(result)
        except Exception as error:
            named = [n for n in result.names() if n in result and not _can_pickle(result, n)]
            what = f"the value {named[0]!r}" if named else "what the function returns"
            raise InvalidProgram(f"store: {what} cannot be pickled: {error}", "store") from error
        with self._lock, self._file:
            query = "insert or replace into stemma_results values (?, ?, ?)"
            self._file.execute(query, (key, time.time(), pickled))

    def seed_of(self, program: str) -> int:
        """The seed with which runs of a program began in this store; a new one at first."""
        with self._lock, self._file:
            query = "insert or ignore into stemma_seeds values (?, ?)"
            self._file.execute(query, (program, secrets.randbits(62)))
            query = "select seed from stemma_seeds where program = ?"
            return int(self._file.execute(query, (program,)).fetchone()[0])

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._file.close()


def _can_pickle(result: Result, name: str) -> bool:
    try:
        pickle.dumps(result[name])
    except Exception:
        return False
    return True
