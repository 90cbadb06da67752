"""`python -m stemma.cluster`: several engines behind one address. Started by `stemma serve`."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence

import zmq

from ..errors import InvalidRequest, StemmaError
from ..flags import add_flags, from_flags
from ..frontend.client.progress import byte_progress
from ..runtime.config import EngineConfig, add_engine_flags, engine_config, located
from ..runtime.schedule.queue.fairness import tenant_weights
from ..runtime.sessions.listener import LINGER_MS, server_keys
from ..runtime.sessions.process import parse, process_parser
from .local import hire_local
from .remote import remote_replicas
from .replica import Replica
from .router import Router
from .scaling import Scaler, Scaling
from .settings import ClusterSettings

GC_THRESHOLDS = 50_000, 20, 250  # programs come and go, and are no circles


def main(argv: Sequence[str] | None = None) -> int:
    """Start the engines, then serve until stopped; 1 with one line on stderr if that cannot be."""
    parser = process_parser("python -m stemma.cluster", __doc__)
    add_flags(parser, ClusterSettings)
    add_engine_flags(parser)
    try:
        args = parse(parser, argv)
        logging.basicConfig(level=args.log_level, format="%(levelname)s %(name)s: %(message)s")
        _serve(args)
    except StemmaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(args: argparse.Namespace) -> None:
    settings = from_flags(ClusterSettings, args)
    keys = server_keys(args, args.endpoint)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    router = _router(args, settings, context)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: router.stop())
    if args.watch_stdin:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        router.start()
        router.listen(args.endpoint, context=context, grace_s=args.grace_s, keys=keys)
    except BaseException:
        router.close()
        raise
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    router.run()
    context.destroy(LINGER_MS)


def _router(
    args: argparse.Namespace, settings: ClusterSettings, context: zmq.Context[zmq.Socket[bytes]]
) -> Router:
    stop_fd = sys.stdin.fileno() if args.watch_stdin else None
    if settings.engines:
        replicas = remote_replicas(settings, context)
        return Router(replicas, placement=settings.placement, stop_fd=stop_fd)
    config = engine_config(args)
    if config.prefill_endpoint is not None or config.prefill_engines:
        raise InvalidRequest.of(
            "prefill_engines", list(config.prefill_engines),
            "none with several engines: prefill_replicas says how many compute prompts for others",
        )  # fmt: skip
    hire = _hire(config, settings, context)
    return Router(
        [hire(number) for number in range(settings.replicas)],
        placement=settings.placement,
        scaling=_scaling(settings, hire),
        stop_fd=stop_fd,
        tenant_weights=tenant_weights(config.tenant_weights),
    )


def _hire(
    config: EngineConfig, settings: ClusterSettings, context: zmq.Context[zmq.Socket[bytes]]
) -> Callable[[int], Replica]:
    if settings.ray is not None:
        try:
            from .ray_engines import hire_on_ray
        except ModuleNotFoundError as error:
            needs = "pip install 'stemma-lm[cluster]'"
            raise InvalidRequest(f"ray={settings.ray!r} needs the package ray: {needs}") from error

        return hire_on_ray(config, settings, context)
    with byte_progress(sys.stderr, f"fetching {config.model_name}") as on_progress:
        config = located(config, on_progress)
    return hire_local(config, settings.most, context, settings.prefill_replicas)


def _scaling(settings: ClusterSettings, hire: Callable[[int], Replica]) -> Scaling | None:
    if settings.most == settings.replicas:
        return None
    scaler = Scaler(
        settings.replicas, settings.most, up_s=settings.scale_up_s, down_s=settings.scale_down_s
    )
    return Scaling(scaler, hire, settings.target_calls)


if __name__ == "__main__":
    sys.exit(main())
