"""Which address a webhook may connect to: a public one, unless its endpoint says that private ones are meant.

A name is resolved once and the connection goes to the address that was looked at, so that a name which answers
differently the second time (DNS rebinding) leads nowhere else. TLS still verifies the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

__all__ = ["AddressError", "pinned"]

_PORTS: Final = {"http": 80, "https": 443}
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
_6TO4: Final = ipaddress.IPv6Network("2002::/16")
"""A relay sends what goes there to the IPv4 address within. So does Teredo's, which is not global by itself."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP: Final = frozenset({0x0000_5EFE, 0x0200_5EFE})
"""The third quarter of an address whose last one is an IPv4 address that the site's router sends to."""


class AddressError(Exception):
    """The address may not be connected to; the message names no URL."""


async def pinned(url: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """A URL with its host replaced by a public address that it has.

    Returns:
        The URL, the headers and the httpx extensions that the request has to be made with.

    Raises:
        AddressError: If the host has no address, or only private, loopback or otherwise special ones.
    """
    parts = urlsplit(url)
    host = str(parts.hostname)
    port = parts.port or _PORTS[parts.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"the host's name cannot be resolved ({error.strerror or error})") from None
    addresses = [ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in found]
    public = [address for address in addresses if _is_public(address)]
    if not public:
        said = ", ".join(sorted({str(address) for address in addresses}))
        raise AddressError(f"{said} is not a public address; set ..._ALLOW_PRIVATE=1 if it is meant")
    address = public[0]
    literal = f"[{address}]" if address.version == 6 else str(address)
    userinfo, _, _ = parts.netloc.rpartition("@")
    netloc = f"{userinfo}@" * bool(userinfo) + f"{literal}:{port}"
    shown = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=netloc)), {"host": shown}, {"sni_hostname": host}


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it is somebody's on the internet, also by the IPv4 address that is within it.

    Sources: RFC 4291 (2000::/3 is what is assigned as global unicast), RFC 6052 (NAT64), RFC 3056, RFC 4380, RFC 5214.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:  # what networks without IPv4 reach all of IPv4 by
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _UNICAST or address in _6TO4:
            return False
        if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
            return False
    return address.is_global and not address.is_multicast
