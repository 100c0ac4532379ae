from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from dataclasses import replace
from itertools import count

import httpx
import pytest

from kc_otel.client.webhooks import Secret, new_secret, verify
from kc_otel.serve.webhooks.deliver import Dispatcher, retry_after_seconds
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from kc_otel.serve.webhooks.outbox import DeliveryState, Outbox
from tests.tools.deliveries import drain

SECRET = new_secret()
AT = 1_700_000_000.0


def client():
    return httpx.AsyncClient(trust_env=False)


@pytest.fixture
def outbox(connection):
    return Outbox(connection)


def endpoints(receiver, *paths):
    return {
        path: WebhookEndpoint(path, f"{receiver.url}/{path}", (Secret.parse(SECRET),), allow_private=True)
        for path in paths
    }


async def eventually(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


def test_delivers_signed_and_in_order(outbox, receiver):
    """A receiver verifies every message, and gets a contract's messages in order."""
    for number in range(5):
        outbox.enqueue("pager", "policy-7b", json.dumps({"n": number}).encode(), AT)

    async def main():
        dispatcher = Dispatcher(outbox, endpoints(receiver, "pager"), client_factory=client, clock=lambda: AT)
        await drain(dispatcher)
        await dispatcher.aclose()
        return dispatcher

    dispatcher = asyncio.run(main())
    bodies = [verify(SECRET, headers, body, now=AT) for _, headers, body in receiver.requests]
    assert bodies == [{"n": number} for number in range(5)]
    assert len({headers["webhook-id"] for _, headers, _ in receiver.requests}) == 5
    assert dispatcher.attempts == {("pager", "delivered"): 5}
    assert {message.state for message in outbox.messages()} == {DeliveryState.DELIVERED}


def test_retry_has_same_id_and_body_and_a_fresh_signature(outbox, receiver):
    """An attempt is signed for its own time; the message stays the same."""
    receiver.answers["/pager"] = [(500, {}), (302, {"location": f"{receiver.url}/elsewhere"}), (204, {})]
    outbox.enqueue("pager", "policy-7b", b"{}", AT)
    ticks = count(int(AT), 1000)

    async def main():
        dispatcher = Dispatcher(
            outbox, endpoints(receiver, "pager"), client_factory=client, clock=lambda: float(next(ticks))
        )
        await drain(dispatcher)
        await dispatcher.aclose()

    asyncio.run(main())
    assert [path for path, _, _ in receiver.requests] == ["/pager"] * 3
    sent = [headers for _, headers, _ in receiver.requests]
    assert len({headers["webhook-id"] for headers in sent}) == 1
    assert len({headers["webhook-timestamp"] for headers in sent}) == 3
    assert len({headers["webhook-signature"] for headers in sent}) == 3
    for headers in sent:
        verify(SECRET, headers, b"{}", now=float(headers["webhook-timestamp"]))


@pytest.mark.slow
def test_endpoint_that_hangs_delays_no_other(outbox, receiver):
    """While one endpoint does not answer, another gets everything."""
    outbox.enqueue("hang", "policy-7b", b"{}", time.time())
    for _ in range(20):
        outbox.enqueue("pager", "policy-7b", b"{}", time.time())

    async def main():
        dispatcher = Dispatcher(outbox, endpoints(receiver, "hang", "pager"), client_factory=client, poll=0.05)
        running = asyncio.create_task(dispatcher.run())
        await eventually(lambda: len(outbox.messages(DeliveryState.DELIVERED)) == 20)
        assert [message.endpoint for message in outbox.messages(DeliveryState.WAITING)] == ["hang"]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_attempt_that_gets_no_answer_times_out(outbox, receiver, caplog):
    """No answer within the limit is a failed attempt, logged, and shown with the message."""
    outbox.enqueue("hang", "policy-7b", b"{}", AT)

    async def main():
        dispatcher = Dispatcher(
            outbox, endpoints(receiver, "hang"), client_factory=client, clock=lambda: AT, timeout=0.05
        )
        await drain(dispatcher)
        await dispatcher.aclose()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    (message,) = outbox.messages(DeliveryState.WAITING)
    assert (message.attempts, message.error) == (1, "no answer within 0.05 s")
    assert "no answer" in caplog.text
    assert SECRET not in caplog.text


def test_refused_connection_is_retried_without_showing_the_url(outbox):
    """The URL may carry a token, so errors do not show it."""
    url = "http://127.0.0.1:9/T0KEN"
    outbox.enqueue("pager", "policy-7b", b"{}", AT)

    def broken(request):
        raise httpx.ConnectError(f"cannot reach {request.url}")

    async def main():
        dispatcher = Dispatcher(
            outbox,
            {"pager": WebhookEndpoint("pager", url, (Secret.parse(SECRET),), allow_private=True)},
            client_factory=lambda: httpx.AsyncClient(transport=httpx.MockTransport(broken)),
            clock=lambda: AT,
        )
        await drain(dispatcher)
        await dispatcher.aclose()

    asyncio.run(main())
    (message,) = outbox.messages(DeliveryState.WAITING)
    assert message.error == "ConnectError: cannot reach the endpoint"


def test_wake_delivers_at_once(outbox, receiver):
    """Messages enqueued by a tick do not wait for the next poll, and neither does what comes after them."""

    async def main():
        dispatcher = Dispatcher(outbox, endpoints(receiver, "pager"), client_factory=client, poll=60.0)
        running = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(0.05)
        for _ in range(3):
            outbox.enqueue("pager", "policy-7b", b"{}", time.time())
        dispatcher.wake()
        await eventually(lambda: len(receiver.requests) == 3)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_message_to_an_unknown_endpoint_waits_and_is_logged_once(outbox, caplog):
    """A contract that names an endpoint nobody configured loses nothing."""
    outbox.enqueue("nobody", "policy-7b", b"{}", AT)

    async def main():
        dispatcher = Dispatcher(outbox, {}, clock=lambda: AT)
        await drain(dispatcher)
        await drain(dispatcher)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert caplog.text.count("no such endpoint") == 1
    assert len(outbox.messages(DeliveryState.WAITING)) == 1


def test_locked_database_is_survived(outbox, connection, receiver, caplog):
    """When the outbox cannot be read or written for a moment, the dispatcher goes on afterwards."""

    class Flaky:
        def __init__(self):
            self.broken = ["SELECT min(created)", "UPDATE outbox SET state"]

        @property
        def in_transaction(self):
            return connection.in_transaction

        def execute(self, statement, *args):
            for start in self.broken:
                if statement.startswith(start):
                    self.broken.remove(start)
                    raise sqlite3.OperationalError("database is locked")
            return connection.execute(statement, *args)

    outbox.enqueue("pager", "policy-7b", b"{}", time.time())
    outbox._connection = Flaky()

    async def main():
        dispatcher = Dispatcher(outbox, endpoints(receiver, "pager"), client_factory=client, poll=0.01)
        running = asyncio.create_task(dispatcher.run())
        await eventually(lambda: outbox.messages(DeliveryState.DELIVERED))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert caplog.text.count("database is locked") == 2
    first, second = receiver.requests
    assert first[1]["webhook-id"] == second[1]["webhook-id"]


def test_an_endpoint_that_is_configured_anew_is_sent_to_again(outbox, receiver):
    """After 410; one whose configuration is what it was is not."""
    known = endpoints(receiver, "pager", "chat")
    for path in known:
        outbox.failed(outbox.enqueue(path, "policy-7b", b"{}", AT), AT, "HTTP 410", status=410)
    Dispatcher(outbox, known).configure(known | {"pager": replace(known["pager"], authorization="Bearer new")})
    assert [status.endpoint for status in outbox.status() if status.disabled] == ["chat"]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("120", 120.0),
        ("Tue, 14 Nov 2023 22:15:20 GMT", 120.0),
        ("Tue, 14 Nov 2023 22:00:00 GMT", 0.0),
        ("soon", None),
        ("-3", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value, seconds):
    """Both forms of the header are understood, and nonsense is ignored."""
    assert retry_after_seconds(value, AT) == seconds
