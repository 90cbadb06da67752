"""A peer's server that does not end when it is asked to, nor does the child it has started.

It answers as llama.cpp's server does until it is asked to generate, which takes for ever, and says
so to whoever listens at the Unix socket STUBBORN_SERVER. Run as a program; standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SOCKET = "STUBBORN_SERVER"
_CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)\n"
_CHILD += "while True: signal.pause()"


class Handler(BaseHTTPRequestHandler):
    """Healthy, and busy from the first completion on."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.connect(os.environ[SOCKET])
            listener.sendall(b"generating")
        threading.Event().wait()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [sys.executable, "-c", _CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it ignores the signal from here on
        port = int(sys.argv[sys.argv.index("--port") + 1])
        ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
