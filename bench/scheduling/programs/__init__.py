"""Agent programs under memory pressure: leases, policies, tiers, and a server driven per call."""

from .command import add_flags, run

__all__ = ["add_flags", "run"]
