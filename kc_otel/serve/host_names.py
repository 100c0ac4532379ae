"""By which names the evaluator is reached: a request that a browser sends by another one is not meant for it.

By DNS rebinding a page points a name of its own at 127.0.0.1; its browser then sends that name as `Host`, and takes
the answers for the page's own. Source: RFC 9110, 7.4.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

__all__ = ["HostNames", "reachable_from_elsewhere"]

_UNSPECIFIED: Final = frozenset({"", "*"})


class HostNames:
    """Names that are ours. Addresses are, for no page can have one of ours as its own name; so is `localhost`.

    Args:
        names: Other host names, without a port.

    >>> "evil.example:4318" in HostNames(["evaluator"]), "evaluator:4318" in HostNames(["evaluator"])
    (False, True)
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"localhost", *map(_plain, names)} - {""}
        self._is_ours = lru_cache(1024)(self._names_us)

    def __contains__(self, host: str) -> bool:
        """Whether the value of a `Host` header names us."""
        return self._is_ours(host)

    def _names_us(self, host: str) -> bool:
        try:
            name = _plain(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            return False
        return name in self._names or _is_address(name)


def reachable_from_elsewhere(host: str) -> bool:
    """Whether a server that listens on a host can be reached from other machines; a name that has no address can."""
    name = host.strip("[]")
    if name in _UNSPECIFIED:
        return True
    try:
        found = {str(where[0]).partition("%")[0] for *_, where in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return True
    return not all(ip_address(address).is_loopback for address in found)


def _plain(name: str) -> str:
    return name.lower().strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
