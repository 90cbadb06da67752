"""`options` of Ollama's requests: sampling under llama.cpp's names, and how a model is loaded."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ...protocol.fixed_fields import only, refuse_others
from ...protocol.known_fields import FewItems
from ...protocol.llamacpp_sampling import repetition_penalty, seed_of

_SAME = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


class Options(BaseModel):
    """What is not given is the model's own default. Ranges are checked by the runtime."""

    model_config = ConfigDict(extra="ignore", strict=True)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None  # below 0: any
    stop: str | FewItems[str] | None = None
    num_predict: int | None = None  # below 1: what fits
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # Of no effect: how Ollama would load the model, and parameters of samplers that are refused.
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_thread: Any = None
    main_gpu: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    embedding_only: Any = None
    draft_num_predict: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    penalize_newline: Any = None

    typical_p: Any = only((None, 1, 1.0), "1")
    tfs_z: Any = only((None, 1, 1.0), "1")
    mirostat: Any = only((None, 0, 0.0), "0")

    def fields(self) -> dict[str, Any]:
        """The same as fields of OpenAI's requests, but for the number of tokens. Raises
        InvalidRequest."""
        refuse_others(self, "options.")
        return {
            **{name: getattr(self, name) for name in _SAME},
            "seed": seed_of(self.seed),
            "stop": self.stop or None,
            "repetition_penalty": repetition_penalty(
                self.repeat_penalty, self.repeat_last_n, "options.repeat_last_n"
            ),
        }

    @property
    def max_tokens(self) -> int | None:
        """None: what fits."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
