"""Whether Triton's kernels run on a device, and what is missing if they do not."""

from __future__ import annotations

import re

import numpy as np
import torch

from ..kv_cache_dtype import KVCacheDtype, kv_cache_dtypes_of_gpu

OLDEST_TRITON = (3, 6)
# 8.0 (Ampere) is the first with bfloat16 products and copies that bypass registers.
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not_triton(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """None if the kernels run for `dtype` on `device`, else the reason, with its remedy."""
    if dtype not in DTYPES:
        return f"no Triton kernels for {dtype}"
    device = torch.device(device)
    return _why_no_compiler() or (
        _why_no_interpreter() if is_interpreted() else _why_no_device(device)
    )


def kv_cache_dtypes(device: torch.device, dtype: torch.dtype) -> tuple[KVCacheDtype, ...]:
    """The formats in which the kernels read KV; the interpreter supports those of any device."""
    newest = (99, 0)
    capability = newest if is_interpreted() else torch.cuda.get_device_capability(device)
    return kv_cache_dtypes_of_gpu(dtype.itemsize, capability)


def triton_version() -> str | None:
    """None: it is not installed, or does not load."""
    try:
        from .language import triton
    except ImportError:
        return None
    return str(triton.__version__)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of any device."""
    try:
        from .language import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def why_no_cuda() -> str | None:
    """None if torch can use a GPU, else the reason, with its remedy."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    return "torch finds no CUDA device: see that nvidia-smi lists one, and CUDA_VISIBLE_DEVICES"


def _why_no_compiler() -> str | None:
    try:
        from .language import triton
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return "triton is not installed: pip install 'stemma-lm[gpu]'"
        return f"triton does not load: {error}"
    if _version(triton.__version__) < OLDEST_TRITON:
        return (
            f"triton {triton.__version__} is too old, 3.6 or newer is needed: "
            "pip install 'stemma-lm[gpu]'"
        )
    return None


def _why_no_interpreter() -> str | None:
    """Triton 3.6's interpreter converts arrays to scalars in a way that numpy 2.4 removed."""
    if _version(np.__version__) >= (2, 4):
        return f"Triton's interpreter fails with numpy {np.__version__}: pip install 'numpy<2.4'"
    return None


def _why_no_device(device: torch.device) -> str | None:
    if device.type == "cpu":
        return "on a CPU they run in Triton's interpreter only: set TRITON_INTERPRET=1"
    if device.type != "cuda":
        return f"no Triton kernels for {device.type}"
    missing = why_no_cuda()
    if missing is not None:
        return missing
    if torch.version.hip is not None:
        return "no Triton kernels for ROCm yet"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST_CAPABILITY:
        return f"compute capability {major}.{minor} is below 8.0 (Ampere)"
    return None


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers: "3.6.0+git" is (3, 6)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
