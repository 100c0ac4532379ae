from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
import time

import httpx
import pytest

from kc_otel.client import webhooks
from kc_otel.client.webhooks import Secret, new_secret, receiver, sign

SECRET = new_secret()


def post(app, body=b'{"status":"firing"}', *, secret=SECRET, message_id="msg_1", method="POST", path="/alerts"):
    async def main():
        headers = sign([Secret.parse(secret)], message_id, body, now=time.time())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
            return await client.request(method, path, content=body, headers=headers)

    return asyncio.run(main())


def test_the_receiver_in_the_documentation_works():
    blocks = re.findall(r"(?:^    .*\n|^\n)+", webhooks.__doc__, re.MULTILINE)
    source = textwrap.dedent(next(block for block in blocks if "Starlette" in block))
    handled = []
    space = {"SECRET": SECRET, "handle": handled.append}
    exec(compile(source, "docstring", "exec"), space)
    assert post(space["app"]).status_code == 204
    refused = post(space["app"], secret=new_secret())
    assert (refused.status_code, "no signature matches" in refused.text) == (401, True)
    assert handled == [{"status": "firing"}]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_receiver_hands_over_verified_bodies_once(asynchronous):
    handled = []

    async def handle_later(body):
        await asyncio.sleep(0)
        handled.append(body)

    app = receiver(SECRET, handle_later if asynchronous else handled.append)
    statuses = [post(app, message_id=message_id).status_code for message_id in ("msg_1", "msg_1", "msg_2")]
    assert statuses == [204, 204, 204]
    assert handled == [{"status": "firing"}] * 2


def test_receiver_refuses_what_it_cannot_trust():
    app = receiver([SECRET, new_secret()], pytest.fail, max_body=100)
    assert post(app, secret=new_secret()).status_code == 401
    assert post(app, b"x" * 101).status_code == 413
    assert post(app, method="GET").status_code == 405


def test_message_whose_handling_failed_is_handled_again():
    failing = [ValueError("disk full")]

    def handle(_body):
        if failing:
            raise failing.pop()

    app = receiver(SECRET, handle)
    with pytest.raises(ValueError, match="disk full"):
        post(app)
    assert post(app).status_code == 204


@pytest.mark.parametrize("fails", [False, True])
def test_two_deliveries_of_one_message_at_the_same_time_are_handled_once(fails):
    """The second waits for the first, and is handled itself where that one failed: neither twice nor not at all."""
    handled, running = [], []

    async def handle(body):
        running.append(body)
        assert len(running) == 1
        await asyncio.sleep(0.01)
        running.clear()
        if fails and not handled:
            handled.append("failed")
            raise ValueError("disk full")
        handled.append(body)

    async def deliver(client):
        body = b'{"status":"firing"}'
        headers = sign([Secret.parse(SECRET)], "msg_1", body, now=time.time())
        return (await client.post("/alerts", content=body, headers=headers)).status_code

    async def main():
        transport = httpx.ASGITransport(receiver(SECRET, handle), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
            return await asyncio.gather(*(deliver(client) for _ in range(3)))

    assert asyncio.run(main()) == [500 if fails else 204, 204, 204]
    assert handled == ["failed"] * fails + [{"status": "firing"}]


def test_receiver_remembers_a_bounded_number_of_messages():
    handled = []
    app = receiver(SECRET, handled.append, remember=2)
    for message_id in ("a", "b", "c", "a"):
        post(app, message_id=message_id)
    assert len(handled) == 4


def test_receiver_answers_the_server_lifespan():
    incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent = []

    async def main():
        async def receive():
            return incoming.pop(0)

        async def send(message):
            sent.append(message["type"])

        await receiver(SECRET, print)({"type": "lifespan"}, receive, send)
        with pytest.raises(RuntimeError, match="websocket"):
            await receiver(SECRET, print)({"type": "websocket"}, receive, send)

    asyncio.run(main())
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize("secret", ["whsec_short", []])
def test_receiver_with_a_bad_secret_does_not_start(secret):
    with pytest.raises(webhooks.SecretError):
        receiver(secret, print)


def test_importing_the_receiver_side_loads_no_framework():
    heavy = "('pydantic', 'starlette', 'httpx', 'numpy')"
    code = f"import sys, kc_otel.client.webhooks; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def plain_post(app, body, **headers):
    """A POST with these headers and nothing of Standard Webhooks."""

    async def main():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
            return await client.post("/", content=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return asyncio.run(main())


def test_receiver_takes_what_alertmanager_authorises():
    handled, body = [], b'{"version":"4"}'
    app = receiver(SECRET, handled.append, bearer="t0ken")
    assert plain_post(app, body, authorization="Bearer t0ken").status_code == 204
    assert plain_post(app, body, authorization="Bearer t0ken").status_code == 204
    for wrong in ("Bearer other", "Basic t0ken", "t0ken"):
        assert plain_post(app, body, authorization=wrong).status_code == 401
    assert plain_post(app, body).status_code == 401
    assert post(app).status_code == 204
    assert len(handled) == 3


def test_receiver_that_could_verify_nothing_is_refused():
    with pytest.raises(webhooks.SecretError):
        receiver(None, pytest.fail)
