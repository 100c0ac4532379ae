"""Webhooks reach private networks only where somebody said so, whatever a name resolves to."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kc_otel.client.webhooks import Secret, new_secret
from kc_otel.serve.webhooks.deliver import AddressError, Dispatcher, pinned
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from kc_otel.serve.webhooks.outbox import DeliveryState, Outbox
from tests.tools.deliveries import drain


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.9", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "[::1]",
        "[fe80::1]", "[fd00::1]", "[::ffff:127.0.0.1]", "localhost", "2130706433", "0x7f.1", "224.0.0.1",
        "[64:ff9b::7f00:1]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::a00:1]", "[2002:7f00:1::]", "[2002:a00:1::1]",
        "[::127.0.0.1]", "[::7f00:1]", "[2001:0:7f00:1::1]", "[2606:4700::5efe:7f00:1]", "[2606:4700::200:5efe:a00:1]",
        "[fec0::1]", "[::]", "[ff02::1]", "[::ffff:0:127.0.0.1]", "[100::1]", "[2001:db8::1]", "[5f00::1]",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused(host):
    """Loopback, private, link-local, metadata, shared, mapped and oddly spelled ones alike."""
    with pytest.raises(AddressError, match=r"not a public address|cannot be resolved"):
        asyncio.run(pinned(f"http://{host}/hook"))


@pytest.mark.parametrize("host", ["93.184.216.34", "[2606:2800:220:1::1]", "[64:ff9b::5db8:d822]"])
def test_an_address_that_is_public_is_connected_to(host):
    """One of IPv4, one of IPv6, and one of IPv4 as a network without IPv4 reaches it."""
    assert asyncio.run(pinned(f"http://{host}/hook"))[0] == f"http://{host}:80/hook"


def test_the_connection_goes_to_the_address_that_was_looked_at(monkeypatch):
    """The name is resolved once; it stays in the Host header and in TLS."""
    answers = [[(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 8443))], []]

    async def resolve(*_args, **_options):
        return answers.pop(0)

    async def main():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        return await pinned("https://user:pw@hooks.example:8443/a?b=c")

    url, headers, extensions = asyncio.run(main())
    assert url == "https://user:pw@93.184.216.34:8443/a?b=c"
    assert headers == {"host": "hooks.example:8443"}
    assert extensions == {"sni_hostname": "hooks.example"}


def test_a_name_with_a_private_address_beside_a_public_one_uses_the_public_one(monkeypatch):
    """What is connected to is what was allowed."""

    async def resolve(*_args, **_options):
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 443)),
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2606:2800:220:1::1", 443, 0, 0)),
        ]

    async def main():
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        return await pinned("https://hooks.example/a")

    assert asyncio.run(main())[0] == "https://[2606:2800:220:1::1]:443/a"


def test_a_private_endpoint_waits_with_the_reason(connection, receiver):
    """Nothing is sent to loopback unless the endpoint allows it; the outbox says what to set."""
    outbox = Outbox(connection)
    outbox.enqueue("pager", "policy-7b", b"{}", 0.0)
    secrets = (Secret.parse(new_secret()),)

    async def deliver(allow_private):
        endpoint = WebhookEndpoint("pager", f"{receiver.url}/pager", secrets, allow_private=allow_private)
        dispatcher = Dispatcher(outbox, {"pager": endpoint}, clock=lambda: 1000.0 * allow_private)
        await drain(dispatcher)
        await dispatcher.aclose()

    asyncio.run(deliver(allow_private=False))
    assert receiver.requests == []
    (message,) = outbox.messages(DeliveryState.WAITING)
    assert "127.0.0.1 is not a public address; set ..._ALLOW_PRIVATE=1" in message.error
    asyncio.run(deliver(allow_private=True))
    assert len(receiver.requests) == 1
