"""A client's calls to a runtime, besides its programs: counters, the tree, the cache, texts.

A `call` is answered at once, within the engine's loop, so each must be short. Calls that load
something are answered when the load is done, calls about long texts when another thread has
tokenized these.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import EngineError, InvalidProgram, InvalidRequest
from ...frontend.protocol import wire
from ...shared_limit import SharedLimit
from ..checkpoint.lora.adapter import Adapter
from ..checkpoint.lora.loader import AdapterLoader, OnLoaded
from ..checkpoint.lora.registry import AdapterRegistry
from ..config import ROLES, Role
from ..encoder_engine import Loaded, LoadedEncoder
from ..programs.context import ProgramContext
from ..programs.hint_targets import HintTargets
from ..programs.text_threads import TextThreads
from ..tokenizer.tokenizer import UNLOCKED_CHARS
from .ahead import AheadPrefills
from .cache_feed import CacheFeed
from .clients import EngineClient, EngineClients
from .observe.observer import Observer
from .prefills import Prefills

MAX_CALL_BYTES = 2 * 1024 * 1024
MAX_WAITING_BYTES = 64 * 1024 * 1024  # of calls that wait for a thread; one tenant may have half
MAX_ERROR_CHARS = 4096
MAX_TREE_NODES = 2000
MAX_NODE_IDS = 1024
_LOAD_ADAPTER = "load_lora_adapter"
_FOLLOW_CACHE = "follow_cache"

_Rest = Callable[[], Any]  # of a call: what the engine's loop does for its result


class Control:
    """The methods of `Connection.call`, by name."""

    def __init__(
        self,
        loaded: Loaded,
        clients: EngineClients,
        context: ProgramContext,
        texts: TextThreads,
    ) -> None:
        self.feed = CacheFeed(loaded)
        self._loaded = loaded
        self._texts = texts
        self._waiting = SharedLimit()  # bytes of calls, by tenant
        self._engine = loaded.engine
        self._clients = clients
        self._context = context
        self.prefills: Prefills | None = None  # for other engines
        self.ahead: AheadPrefills | None = None  # of likely texts
        self.adapter_loader: AdapterLoader | None = None
        if loaded.adapters is not None:
            self.adapter_loader = AdapterLoader(loaded.adapters, loaded.config.lora_root)
        self.observer = Observer(
            loaded.engine, partial(loaded.tokenizer.decode_cached, skip_special=False)
        )
        self._methods: dict[str, Callable[..., Any]] = {
            "info": self._info,
            "vitals": self._vitals,
            "metrics": self._metrics,
            "tree": self._tree,
            "flush_cache": self._engine.flush_cache,
            "watch": self.observer.watch,
            "lora_adapters": self._lora_adapters,
            "lora_users": self._lora_users,
            "set_role": self._set_role,
            "unload_lora_adapter": self._unload_lora_adapter,
        }
        self._of_texts: dict[str, Callable[..., _Rest]] = {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "kv_hints": self._carry_out_hints,
        }

    def answer(self, client: EngineClient, message: wire.Message) -> None:
        """Reply to a `call`, whatever it contains."""
        header = message.header
        method, args = header.get("method"), header.get("args")
        try:
            if message.num_bytes > MAX_CALL_BYTES:
                raise InvalidProgram(
                    f"a call of {message.num_bytes} bytes; at most {MAX_CALL_BYTES} are answered"
                )
            given = args if isinstance(args, dict) else {}
            if method == _LOAD_ADAPTER:
                self._load_lora_adapter(partial(_tell_loaded, client, header.get("id")), **given)
                return
            if method in self._of_texts:
                begin = partial(self._of_texts[method], client, **given)
                self._answer_of_texts(client, header.get("id"), begin, message.num_bytes)
                return
            if method == _FOLLOW_CACHE:
                self.feed.follow(client)
                client.link.put("reply", id=header.get("id"), ok=True, result=None)
                return
            if method not in self._methods:
                known = sorted([*self._methods, *self._of_texts, _LOAD_ADAPTER, _FOLLOW_CACHE])
                raise InvalidProgram.of("method", method, f"one of {known}")
            result = self._methods[method](**given)
            client.link.put("reply", id=header.get("id"), ok=True, result=result)
        except Exception as error:  # the arguments are a client's: report any error to it
            _tell_error(client, header.get("id"), error)

    def _answer_of_texts(
        self, client: EngineClient, call_id: Any, begin: Callable[[], _Rest], num_bytes: int
    ) -> None:
        """Answer a call of which only the rest must be done on the engine's loop; `begin`, which
        tokenizes, is left to another thread if its texts may be long. Raises what `begin` does, and
        EngineError where too much waits for that thread."""

        def end(rest: _Rest | Exception) -> None:
            if self._clients.by_session.get(client.session) is not client:
                return  # it has gone meanwhile
            try:
                if isinstance(rest, Exception):
                    raise rest
                client.link.put("reply", id=call_id, ok=True, result=rest())
            except Exception as error:
                _tell_error(client, call_id, error)

        if num_bytes < UNLOCKED_CHARS:
            end(begin())
            return
        tenant = client.tenant
        if self._waiting.num_missing(tenant, num_bytes, MAX_WAITING_BYTES):
            raise EngineError(
                f"calls of {self._waiting.num_used} bytes wait, {self._waiting.used_by(tenant)} of "
                f"them yours, and {MAX_WAITING_BYTES} may; each may have as many as are left "
                "free; try again later"
            )

        def end_waiting(rest: _Rest | Exception) -> None:
            self._waiting.give_back(tenant, num_bytes)
            end(rest)

        self._texts.start(begin, end_waiting, num_chars=num_bytes, tenant=tenant)
        self._waiting.take(tenant, num_bytes)

    def _tokenize(self, client: EngineClient, text: object, has_bos: bool = False) -> _Rest:
        tokenizer = self._loaded.tokenizer
        ids = [*(tokenizer.bos_ids if has_bos else ()), *tokenizer.encode(str(text))]
        return lambda: ids

    def _detokenize(self, client: EngineClient, ids: list[Any], skip_special: bool = True) -> _Rest:
        wanted = [int(i) for i in ids]
        text = self._loaded.tokenizer.decode(wanted, skip_special=bool(skip_special))
        return lambda: text

    def _carry_out_hints(
        self,
        client: EngineClient,
        actions: object,
        namespace: str = "",
        account: str = "",
        lora_path: str | None = None,
    ) -> _Rest:
        if not isinstance(actions, list) or not all(isinstance(item, dict) for item in actions):
            raise InvalidProgram.of("actions", actions, "a list of objects")
        context = self._context
        adapter = context.adapter(lora_path)
        namespace = str(namespace) if adapter is None else adapter.namespace(str(namespace))
        desk = HintTargets(
            context.tokenizer,
            context.responses,
            context.vocab_size,
            context.max_text_chars,
            namespace,
            str(account),
        )
        known = desk.tokenized(actions)
        return lambda: desk.carry_out(actions, client.stated, known)

    @property
    def _registry(self) -> AdapterRegistry:
        """Raises InvalidRequest where no adapters are served."""
        registry = self._loaded.adapters
        if registry is None:
            raise _no_adapters()
        return registry

    def _lora_adapters(self) -> list[dict[str, Any]]:
        return [adapter.describe() for adapter in self._registry.adapters]

    def _load_lora_adapter(self, on_loaded: OnLoaded, lora_name: str, lora_path: str) -> None:
        if self.adapter_loader is None:
            raise _no_adapters()
        self.adapter_loader.load(str(lora_name), str(lora_path), on_loaded)

    def _unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """The name is gone on return; `num_requests` still use the adapter and finish normally."""
        adapter = self._registry.unload(str(lora_name))
        return {**adapter.describe(), **self._lora_users(adapter.load_id)}

    def _lora_users(self, load_id: str) -> dict[str, Any]:
        return {"num_requests": self._engine.scheduler.num_adapter_users(str(load_id))}

    def _set_role(self, role: Role, replica: int = 0) -> dict[str, Any]:
        """From the next prompt on."""
        if replica != 0:
            raise _one_engine(replica)
        if role not in ROLES:
            raise InvalidRequest.of("role", role, f"one of {', '.join(ROLES)}")
        sender, receiver = self._loaded.kv_sender, self._engine.kv_receiver
        if isinstance(self._loaded, LoadedEncoder) or (sender is None and receiver is None):
            reason = "it was started with neither prefill_endpoint nor prefill_engines"
            raise InvalidRequest(f"role={role!r} has no effect: {reason}", "role")
        self._loaded.set_role(role)
        return {"role": role}

    def _info(self, has_experts: bool = True) -> dict[str, Any]:
        """`has_experts`: with their loads, for which a device is waited: not for who asks often."""
        return {
            **self._loaded.describe(),
            **self._engine.describe(),
            "role": self._loaded.role,
            "experts": self._loaded.describe_experts() if has_experts else {},
            "prefills": {} if self.prefills is None else self.prefills.describe(),
            "ahead": {} if self.ahead is None else self.ahead.describe(),
            "foretold": {}
            if (foreteller := self._context.foreteller) is None
            else foreteller.describe(),
            "num_clients": len(self._clients),
            "num_programs": self._clients.num_programs,
            "peak_rss_bytes": _peak_rss_bytes(),
            "ranks": self._loaded.describe_ranks(),
        }

    def _vitals(self) -> dict[str, Any]:
        """Whether the engine makes progress; cheap, so it may be called often. `since_step_s`: None
        before the first step that succeeded."""
        last = self._engine.last_step_s
        return {
            "since_step_s": None if last is None else time.monotonic() - last,
            "num_programs": self._clients.num_programs,
        }

    def _metrics(self) -> dict[str, Any]:
        """The fields of `info`, and histograms of requests."""
        return {**self._info(), "requests": self._engine.scheduler.latencies.describe()}

    def _tree(
        self,
        max_token_ids: int = 48,
        max_nodes: int = 1000,
        has_text: bool = True,
        namespace: str | None = None,
        replica: int = 0,
    ) -> dict[str, Any]:
        """The radix tree; of a large one the part used last. With `namespace` only that namespace.
        Includes the text of each edge's first tokens, unless the client decodes them itself."""
        if replica != 0:
            raise _one_engine(replica)
        scheduler = self._engine.scheduler
        rows: list[dict[str, Any]] = [
            {**node}
            for node in scheduler.kv_cache.snapshot(
                [request.node for request in scheduler.running if request.node is not None],
                max_nodes=_bounded("max_nodes", max_nodes, MAX_TREE_NODES),
                max_token_ids=_bounded("max_token_ids", max_token_ids, MAX_NODE_IDS),
            )
            if namespace is None or node["namespace"] == namespace
        ]
        if has_text:
            decode = self._loaded.tokenizer.decode_cached
            for row in rows:
                row["text"] = decode(row["token_ids"], skip_special=False)
        num_nodes = scheduler.kv_cache.tree.num_nodes  # of the whole tree, without roots
        return {"nodes": rows, "num_nodes": num_nodes, **self._engine.describe()}


def _no_adapters() -> InvalidRequest:
    return InvalidRequest("no adapters are served: the engine needs enable_lora", "lora_name")


def _one_engine(replica: object) -> InvalidRequest:
    return InvalidRequest.of("replica", replica, "0: there is one engine")


def _tell_loaded(client: EngineClient, call_id: Any, outcome: Adapter | Exception) -> None:
    if isinstance(outcome, Exception):
        _tell_error(client, call_id, outcome)
    else:
        client.link.put("reply", id=call_id, ok=True, result=outcome.describe())


def _tell_error(client: EngineClient, call_id: Any, error: Exception) -> None:
    told = {"error": str(error)[:MAX_ERROR_CHARS], "kind": type(error).__name__}
    client.link.put("reply", id=call_id, ok=False, **told)


def _bounded(name: str, value: object, most: int) -> int:
    """Raises InvalidProgram."""
    if not isinstance(value, int) or not 0 <= value <= most:
        raise InvalidProgram.of(name, value, f"an integer in [0, {most}]")
    return value


def _peak_rss_bytes() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
