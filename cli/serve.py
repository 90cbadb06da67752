"""`stemma serve`: a runtime for others, over ZeroMQ and HTTP."""

from __future__ import annotations

import argparse
import json
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ..cluster.settings import ClusterSettings
from ..errors import InvalidRequest
from ..flags import add_flags, from_flags
from ..frontend.client.engine_process import EngineProcess
from ..runtime.checkpoint.location import EMBEDDED_MODEL
from ..runtime.config import add_engine_flags, engine_config, options_of
from ..runtime.sessions.ipc_file import remove_leftovers
from ..runtime.sessions.listener import add_client_flags, server_keys
from ..server.settings import ServerSettings, add_server_flags, server_settings
from ..server.supervisor import EngineSupervisor
from .connect import Commands, default_endpoint, engine_options, own_folder
from .named_models import named_models

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .several_models import SeveralModels

MAX_FILES = 1 << 20
_MODEL_HELP = (
    "folder in Hugging Face layout, .gguf file, or hub id as in NAME/MODEL[@REVISION]; repeated "
    "as NAME=MODEL, several models that are loaded on demand (default: the embedded model)"
)


def add_parser(commands: Commands) -> None:
    """Register the commands: `deploy` serves from a Ray cluster where no other is named."""
    serves = "serve programs (ZeroMQ) and OpenAI's API (HTTP)"
    _add_flags(commands.add_parser("serve", help=serves))
    deploy = commands.add_parser("deploy", help=f"{serves} with the engines on a Ray cluster")
    _add_flags(deploy)
    deploy.set_defaults(ray="auto")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)
    programs = parser.add_argument_group("programs (ZeroMQ)")
    programs.add_argument(
        "--endpoint", metavar="ADDRESS",
        help="ZeroMQ address, ipc://PATH or tcp://HOST:PORT (default: an ipc file by the port)",
    )  # fmt: skip
    add_client_flags(programs)
    add_flags(parser, ClusterSettings)
    add_engine_flags(parser, model={"action": "append", "default": [], "help": _MODEL_HELP})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until asked to stop."""
    settings = server_settings(args)
    models = named_models(args.model)
    if settings.cascade and not models:
        allowed = "left out with a single model: NAME=MODEL names each of several"
        raise InvalidRequest.of("cascade", settings.cascade[0], allowed)
    args.model = args.model[-1] if args.model else EMBEDDED_MODEL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the HTTP server has its own
    with _listener(settings) as listener:
        port = listener.getsockname()[1]
        if args.endpoint is None:
            remove_leftovers(own_folder())
        endpoint = args.endpoint or default_endpoint(port)
        server_keys(args, (endpoint,))  # refuse here what the engine's process would refuse
        if models:
            from .several_models import SeveralModels  # plans them, which one does not need

            served: SeveralModels | _OneModel = SeveralModels(args, models, settings, endpoint)
        else:
            served = _OneModel(args, settings, endpoint)
        _raise_file_limit()  # the engine's, too
        served.engine.start()
        try:
            # Slow to import, so while the engine starts.
            from ..server.http_server import serve
            from ..server.metrics.request_log import configure_logging

            configure_logging(settings.log_level, settings.log_format)
            announce = partial(_announce, args, served, port)
            return serve(served.engine, served.app(), listener, announce)
        finally:
            served.engine.stop()


class _OneModel:
    """The engine of the only model, which has no name of its own."""

    def __init__(self, args: argparse.Namespace, settings: ServerSettings, endpoint: str) -> None:
        """Raises InvalidRequest."""
        self.endpoint = endpoint
        self._args = args
        self._settings = settings
        self.engine = EngineSupervisor(
            _launch(args, endpoint),
            timeout_s=settings.engine_timeout_s,
            programs_outlive=from_flags(ClusterSettings, args).is_many,
        )

    def app(self) -> FastAPI:
        """The application."""
        from ..server.app import create_app

        return create_app(self.engine, self._settings)

    def lines(self) -> list[str]:
        """What is served."""
        info = self.engine.connection.info
        adapters = [f"  adapters  {', '.join(name for name, _ in self._args.lora_paths)}"]
        return [
            f"{info['model']} ({info['dtype']}, context {info['max_model_len']})",
            *(adapters if self._args.lora_paths else ()),
            *_warnings(self._args, info),
        ]


def _listener(settings: ServerSettings) -> socket.socket:
    """The socket at the address that is asked for. Raises InvalidRequest where it is taken."""
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidRequest(f"cannot listen at {_url(host, port)}: {error}", "port") from error


def _raise_file_limit() -> None:
    """Each connection is a file: allow this process as many as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _launch(args: argparse.Namespace, endpoint: str) -> partial[EngineProcess]:
    """Starts an engine with the flags' values. Raises InvalidRequest."""
    names = ("server_key", "client_keys", "grace_s")
    cluster = from_flags(ClusterSettings, args)
    if cluster.ray is None and not cluster.engines:
        own = engine_options(args)
    else:  # who runs the model fetches it
        own = options_of(engine_config(args))
    if cluster.engines and own:
        name, value = next(iter(own.items()))
        raise InvalidRequest.of(name, value, "nothing with --engines: each has its own")
    options = {**own, **{name: getattr(args, name) for name in names}}
    model = options.pop("model", None)
    start = partial(EngineProcess, model, listen=(endpoint,), has_log=False)
    if not cluster.is_many:
        return partial(start, options=options)
    return partial(start, options={**options, **asdict(cluster)}, module="stemma.cluster")


def _announce(args: argparse.Namespace, served: SeveralModels | _OneModel, port: int) -> None:
    """Where to point a client."""
    url = _url(args.host, port)
    info = served.engine.connection.info if isinstance(served, _OneModel) else {}
    path, body = example_request(info)
    keys = ", server_key=..., client_key=..." if args.server_key else ""
    lines = (
        *served.lines(),
        f"  page      {url}/",
        f"  OpenAI    base_url {url}/v1",
        f"  curl      curl {url}{path} -H 'content-type: application/json' \\",
        f"              -d '{json.dumps(body)}'",
        f'  programs  stemma.Runtime("{served.endpoint}"{keys})',
        "  stop      Ctrl-C",
    )
    print("\n".join(lines), flush=True)


def example_request(info: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A path and a body by which to try what a model does, from what its engine says of itself."""
    if info.get("generates", True):
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}
    labels = (info.get("scores") or {}).get("labels", ())
    if len(labels) == 1:
        return "/rerank", {"query": "Who has a kite?", "documents": ["Nora has.", "It rains."]}
    if labels:
        return "/classify", {"input": "Nora has a kite."}
    return "/v1/embeddings", {"input": "Nora has a kite."}


def _warnings(args: argparse.Namespace, info: Mapping[str, Any]) -> Iterator[str]:
    """What there is to know before the first request."""
    from ..frontend.chat_format.chat_format import UNKNOWN_FORMAT, ChatFormat

    if ChatFormat.of(info, args.tool_call_parser, args.reasoning_parser).is_unknown:
        yield f"  warning   tools: {UNKNOWN_FORMAT} (--tool-call-parser)"
    if (slow_path := info.get("slow_path")) is not None:
        yield f"  warning   {slow_path}"


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
