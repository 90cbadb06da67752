"""SGLang's `global_config`: its fields under their names, and what they do here.

Most say how SGLang's frontend or server works and change nothing here; they may be set, so that
scripts run as they are. A name that SGLang does not have is refused.
"""

from __future__ import annotations

from typing import Any

from ..errors import InvalidRequest
from .backend import chosen_backend, set_default_backend
from .client.backend import Backend
from .protocol.native_answer import FIXED_SAMPLING

_NO_EFFECT: dict[str, Any] = {
    "verbosity": 0,  # 2 prints final texts in old SGLangs; print(state.text()) does
    "enable_precache_with_tracing": True,  # prefixes are shared in any case
    "enable_parallel_encoding": True,  # forks are encoded in parallel in any case
    "default_init_new_token_ratio": 0.7,  # of SGLang's scheduler, and so are the next three
    "default_min_new_token_ratio_factor": 0.14,
    "default_new_token_ratio_decay_steps": 600.0,
    "retract_decode_steps": 20,
    "flashinfer_workspace_size": 384 * 1024 * 1024,
    "enable_gds": False,
    "gds_path": "/tmp/gds/",
}
_FIXED = {  # theirs, and what may be said of it
    "skip_special_tokens_in_output": FIXED_SAMPLING["skip_special_tokens"],
    "spaces_between_special_tokens_in_out": FIXED_SAMPLING["spaces_between_special_tokens"],
}


class GlobalConfig:
    """`default_backend` is that of `set_default_backend`, None before one was set or started;
    `skip_special_tokens_in_output` and `spaces_between_special_tokens_in_out` can only be True; all
    other fields of SGLang's have no effect. Raises InvalidRequest for a name that is none."""

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {**_NO_EFFECT, **_FIXED})

    @property
    def default_backend(self) -> Backend | None:
        """The backend of every `run` that names none."""
        return chosen_backend()

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_values")
        if name not in values:
            raise AttributeError(f"global_config has no {name!r}: there are {_names()}")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "default_backend":
            set_default_backend(value)
            return
        if name not in self._values:
            raise InvalidRequest.of(name, value, f"one of {_names()}")
        if name in _FIXED and value != _FIXED[name]:
            raise InvalidRequest.of(name, value, str(_FIXED[name]))
        self._values[name] = value

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_names()]


def _names() -> list[str]:
    return sorted(["default_backend", *_NO_EFFECT, *_FIXED])


global_config = GlobalConfig()
