"""Webhooks are delivered signed, in order and at least once, and only to addresses that they may go to."""

import asyncio
import json
import logging
import socket
import sqlite3
import time
from dataclasses import replace
from functools import partial
from itertools import count

import httpx
import pytest

from kc_otel.client.webhooks import Secret, new_secret, verify
from kc_otel.serve.webhooks.deliver import AddressError, Dispatcher, pinned
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from kc_otel.serve.webhooks.outbox import DeliveryState, Outbox
from tests.tools.deliveries import drain

SECRET = new_secret()
AT = 1_700_000_000.0
client = partial(httpx.AsyncClient, trust_env=False)


@pytest.fixture
def outbox(connection):
    return Outbox(connection)


def endpoints(receiver, *paths):
    return {
        path: WebhookEndpoint(path, f"{receiver.url}/{path}", (Secret.parse(SECRET),), allow_private=True)
        for path in paths
    }


def dispatched(outbox, known, **options):
    async def main():
        dispatcher = Dispatcher(outbox, known, **{"client_factory": client, "clock": lambda: AT} | options)
        await drain(dispatcher)
        await dispatcher.aclose()
        return dispatcher

    return asyncio.run(main())


def run_until(condition, outbox, known, begun=lambda _dispatcher: None, **options):
    async def main():
        dispatcher = Dispatcher(outbox, known, client_factory=client, **options)
        running = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(0.05)
        begun(dispatcher)
        deadline = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_delivers_signed_and_in_order(outbox, receiver):
    outbox.enqueue("nobody", "policy-7b", b"{}", AT)
    for number in range(5):
        outbox.enqueue("pager", "policy-7b", json.dumps({"n": number}).encode(), AT)
    dispatcher = dispatched(outbox, endpoints(receiver, "pager"))
    bodies = [verify(SECRET, headers, body, now=AT) for _, headers, body in receiver.requests]
    assert bodies == [{"n": number} for number in range(5)]
    assert len({headers["webhook-id"] for _, headers, _ in receiver.requests}) == 5
    assert dispatcher.attempts == {("pager", "delivered"): 5}
    assert [message.endpoint for message in outbox.messages(DeliveryState.WAITING)] == ["nobody"], "it is not known"


def test_retry_has_same_id_and_body_and_a_fresh_signature(outbox, receiver):
    receiver.answers["/pager"] = [(500, {}), (302, {"location": f"{receiver.url}/elsewhere"}), (204, {})]
    outbox.enqueue("pager", "policy-7b", b"{}", AT)
    ticks = count(int(AT), 1000)
    dispatched(outbox, endpoints(receiver, "pager"), clock=lambda: float(next(ticks)))
    assert [path for path, _, _ in receiver.requests] == ["/pager"] * 3
    sent = [headers for _, headers, _ in receiver.requests]
    assert len({headers["webhook-id"] for headers in sent}) == 1
    assert len({headers["webhook-timestamp"] for headers in sent}) == 3
    assert len({headers["webhook-signature"] for headers in sent}) == 3
    for headers in sent:
        verify(SECRET, headers, b"{}", now=float(headers["webhook-timestamp"]))


@pytest.mark.slow
def test_endpoint_that_hangs_delays_no_other(outbox, receiver):
    outbox.enqueue("hang", "policy-7b", b"{}", time.time())
    for _ in range(20):
        outbox.enqueue("pager", "policy-7b", b"{}", time.time())
    known = endpoints(receiver, "hang", "pager")
    run_until(lambda: len(outbox.messages(DeliveryState.DELIVERED)) == 20, outbox, known, poll=0.05)
    assert [message.endpoint for message in outbox.messages(DeliveryState.WAITING)] == ["hang"]


def test_attempt_that_gets_no_answer_times_out(outbox, receiver, caplog):
    outbox.enqueue("hang", "policy-7b", b"{}", AT)
    with caplog.at_level(logging.WARNING):
        dispatched(outbox, endpoints(receiver, "hang"), timeout=0.05)
    (message,) = outbox.messages(DeliveryState.WAITING)
    assert (message.attempts, message.error, message.arrived) == (1, "no answer within 0.05 s", True)
    assert "no answer" in caplog.text
    assert SECRET not in caplog.text


def test_refused_connection_is_retried_without_showing_the_url(outbox):
    url = "http://127.0.0.1:9/T0KEN"
    outbox.enqueue("pager", "policy-7b", b"{}", AT)

    def broken(request):
        raise httpx.ConnectError(f"cannot reach {request.url}")

    known = {"pager": WebhookEndpoint("pager", url, (Secret.parse(SECRET),), allow_private=True)}
    dispatched(outbox, known, client_factory=lambda: httpx.AsyncClient(transport=httpx.MockTransport(broken)))
    (message,) = outbox.messages(DeliveryState.WAITING)
    assert message.error == "ConnectError: cannot reach the endpoint"


def test_wake_delivers_at_once(outbox, receiver):
    def begun(dispatcher):
        for _ in range(3):
            outbox.enqueue("pager", "policy-7b", b"{}", time.time())
        dispatcher.wake()

    run_until(lambda: len(receiver.requests) == 3, outbox, endpoints(receiver, "pager"), begun, poll=60.0)


def test_locked_database_is_survived(outbox, connection, receiver, caplog):

    class Flaky:
        def __init__(self):
            self.broken = ["SELECT min(created)", "UPDATE outbox SET state"]

        def __getattr__(self, name):
            return getattr(connection, name)

        def execute(self, statement, *args):
            for start in self.broken:
                if statement.startswith(start):
                    self.broken.remove(start)
                    raise sqlite3.OperationalError("database is locked")
            return connection.execute(statement, *args)

    outbox.enqueue("pager", "policy-7b", b"{}", time.time())
    outbox._connection = Flaky()
    with caplog.at_level(logging.WARNING):
        run_until(lambda: outbox.messages(DeliveryState.DELIVERED), outbox, endpoints(receiver, "pager"), poll=0.01)
    assert caplog.text.count("database is locked") == 2
    first, second = receiver.requests
    assert first[1]["webhook-id"] == second[1]["webhook-id"]


def test_a_message_that_is_superseded_before_its_attempt_is_not_sent(outbox, receiver):
    """The end of its incident is written while it waits for its turn: nobody would close what it opens."""
    outbox.enqueue("pager", "policy-7b", b"{}", AT, group="incident")
    begin = outbox.begin

    def after_the_end(message):
        outbox.enqueue("pager", "policy-7b", b"{}", AT, group="incident", ends=True)
        return begin(message)

    outbox.begin = after_the_end
    dispatched(outbox, endpoints(receiver, "pager"))
    assert receiver.requests == []
    assert {message.state for message in outbox.messages()} == {DeliveryState.SUPERSEDED}


def test_an_endpoint_that_hangs_up_without_an_answer_may_have_accepted(outbox):
    async def hang_up(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def main():
        async with await asyncio.start_server(hang_up, "127.0.0.1") as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/pager"
            known = {"pager": WebhookEndpoint("pager", url, (Secret.parse(SECRET),), allow_private=True)}
            dispatcher = Dispatcher(outbox, known, client_factory=client, clock=lambda: AT)
            await drain(dispatcher)
            await dispatcher.aclose()

    outbox.enqueue("pager", "policy-7b", b"{}", AT)
    asyncio.run(main())
    (message,) = outbox.messages()
    assert (message.attempts, message.arrived) == (1, True)


def test_a_message_that_may_have_been_accepted_once_stays_one(outbox, receiver):
    """The process was killed during an attempt, and the endpoint refuses connections since."""
    first = outbox.enqueue("pager", "policy-7b", b"{}", AT)
    outbox.begin(first)
    gone = {"pager": replace(endpoints(receiver, "pager")["pager"], url="http://127.0.0.1:9/pager")}
    dispatched(outbox, gone)
    (message,) = outbox.messages()
    assert (message.attempts, message.error.partition(":")[0], message.arrived) == (1, "ConnectError", True)


@pytest.mark.parametrize(("status", "restarts"), [(400, False), (400, True), (410, False)])
def test_a_rejected_page_is_sent_again_once_its_endpoint_is_configured_anew_or_the_evaluator_restarts(
    outbox, receiver, status, restarts
):
    known = endpoints(receiver, "pager", "chat")

    async def main():
        dispatcher = Dispatcher(outbox, known, client_factory=client, clock=lambda: AT + 10.0)
        await drain(dispatcher)
        for path in ("pager", "chat")[: 1 + (status == 410)]:
            outbox.answered(outbox.enqueue(path, "policy-7b", b"{}", AT), AT, status, f"HTTP {status}")
        await drain(dispatcher)
        assert receiver.requests == []
        if restarts:
            dispatcher = Dispatcher(outbox, known, client_factory=client, clock=lambda: AT + 10.0)
        else:
            dispatcher.configure(known | {"pager": replace(known["pager"], authorization="Bearer new")})
        await drain(dispatcher)
        await dispatcher.aclose()

    asyncio.run(main())
    assert [path for path, _, _ in receiver.requests] == ["/pager"]


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
    with pytest.raises(AddressError, match=r"not a public address|cannot be resolved"):
        asyncio.run(pinned(f"http://{host}/hook"))


@pytest.mark.parametrize("host", ["93.184.216.34", "[2606:2800:220:1::1]", "[64:ff9b::5db8:d822]"])
def test_an_address_that_is_public_is_connected_to(host):
    """One of IPv4, one of IPv6, and one of IPv4 as a network without IPv4 reaches it."""
    assert asyncio.run(pinned(f"http://{host}/hook"))[0] == f"http://{host}:80/hook"


@pytest.mark.parametrize(
    ("url", "answers", "expected"),
    [
        (
            "https://user:pw@hooks.example:8443/a?b=c",
            ["93.184.216.34"],
            ("https://user:pw@93.184.216.34:8443/a?b=c", {"host": "hooks.example:8443"}),
        ),
        (
            "https://hooks.example/a",
            ["10.0.0.1", "2606:2800:220:1::1"],
            ("https://[2606:2800:220:1::1]:443/a", {"host": "hooks.example"}),
        ),
    ],
)
def test_the_connection_goes_to_the_public_address_that_was_looked_at(monkeypatch, url, answers, expected):
    """The name is resolved once; it stays in the Host header and in TLS."""
    resolved = [answers]

    async def resolve(*_args, **_options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolved.pop()]

    async def main():
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        return await pinned(url)

    assert asyncio.run(main()) == (*expected, {"sni_hostname": "hooks.example"})


def test_a_private_endpoint_waits_with_the_reason(connection, receiver):
    outbox = Outbox(connection)
    outbox.enqueue("pager", "policy-7b", b"{}", 0.0)
    secrets = (Secret.parse(new_secret()),)

    def deliver(allow_private):
        endpoint = WebhookEndpoint("pager", f"{receiver.url}/pager", secrets, allow_private=allow_private)
        dispatched(outbox, {"pager": endpoint}, clock=lambda: 1000.0 * allow_private)

    deliver(allow_private=False)
    assert receiver.requests == []
    (message,) = outbox.messages(DeliveryState.WAITING)
    assert "127.0.0.1 is not a public address; set ..._ALLOW_PRIVATE=1" in message.error
    deliver(allow_private=True)
    assert len(receiver.requests) == 1
