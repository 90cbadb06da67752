"""Recurrent layers on a GPU; see `ops.Recurrence`."""

from __future__ import annotations

from ..ops import Recurrence
from .recurrence_rows import accept_drafts, plan_recurrence
from .short_convolution import short_convolution
from .state_scan import gated_delta_rule, state_space_scan

RECURRENCE = Recurrence(
    plan_recurrence, short_convolution, gated_delta_rule, state_space_scan, accept_drafts
)
