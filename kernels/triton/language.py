"""The only module that imports triton.

Raises ImportError at import if it is not installed; `registry` reports it.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
