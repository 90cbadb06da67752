"""The one place that imports triton.

Raises ImportError at import where it is not installed; `registry` says so in words.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
