"""Protects a server without keys from web pages open in a browser on its host.

A page of any site may send requests to 127.0.0.1. The browser reports their source: `Origin` (every
cross-origin request but a plain GET) and `Sec-Fetch-Site` (W3C, Fetch Metadata). After DNS
rebinding a page is of the same origin as this server, but its name is in `Host`; an address or
`localhost` there cannot be rebound.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from ..protocol.failures import Refusal


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """Which hosts a request may name, and from which origins it may come."""

    hosts: frozenset[str]  # beside addresses and localhost; `*`: any
    origins: frozenset[str]

    @classmethod
    def of(
        cls, host: str, allowed_hosts: Sequence[str], origins: Sequence[str], *, has_keys: bool
    ) -> BrowserRules:
        """`has_keys`: a page without a key can do nothing, so any host is allowed, unless a list
        was given."""
        hosts = {name.lower() for name in allowed_hosts}
        if not hosts and has_keys:
            hosts.add("*")
        return cls(frozenset({*hosts, host.lower()}), frozenset(origins))

    def check(
        self, hosts: Sequence[str], origin: str | None, site: str | None, *, is_open: bool
    ) -> None:
        """`site`: value of `Sec-Fetch-Site`; `is_open`: other sites may link to the path. Raises
        Refusal."""
        if "*" not in self.hosts:
            for host in hosts:
                self._check_host(host)
        if origin is not None:
            if self._is_own(origin, hosts) or self._is_allowed(origin):
                return
            raise Refusal(403, f"origin {origin[:200]!r} is not allowed: see --cors-origin")
        if site in ("cross-site", "same-site") and not is_open:
            raise Refusal(403, "requests from other sites' pages are not allowed")

    def _check_host(self, host: str) -> None:
        name = _name_of(host)
        if name in self.hosts or _is_address(name):
            return
        if name == "localhost" or name.endswith(".localhost"):
            return
        raise Refusal(403, f"host {host[:200]!r} is not allowed: see --allowed-host")

    def _is_own(self, origin: str, hosts: Sequence[str]) -> bool:
        return len(hosts) == 1 and origin.partition("://")[2].lower() == hosts[0].lower()

    def _is_allowed(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins


def _name_of(host: str) -> str:
    """The host in lower case, without its port; an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
