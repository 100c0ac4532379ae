"""A real Alertmanager takes what the outbox delivers, and what it sends on reaches the ready receiver."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from kc_otel.client.webhooks import receiver as make_receiver
from kc_otel.judge.escalation.alerts import PolicyState, advance
from kc_otel.judge.escalation.webhook_body import alert_body, encode
from kc_otel.serve.webhooks.deliver import Dispatcher
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from kc_otel.serve.webhooks.formats import Format
from kc_otel.serve.webhooks.outbox import DeliveryState, Outbox
from tests.tools.deliveries import drain
from tests.tools.servers import free_address, running, sink

pytestmark = pytest.mark.slow

CONFIGURATION = """
route: {receiver: kc, group_by: [contract], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}
receivers:
  - name: kc
    webhook_configs:
      - url: URL
        send_resolved: true
        http_config: {authorization: {credentials: t0ken}}
"""


@pytest.fixture
def notified():
    """URL of a server that hands every request to the ready receiver, and the bodies that it accepted."""
    bodies, statuses = [], []
    app = make_receiver(None, bodies.append, bearer="t0ken")

    async def ask(content, headers):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://receiver") as client:
            return await client.post("/", content=content, headers=headers)

    def take(content, headers):
        statuses.append(asyncio.run(ask(content, headers)).status_code)
        return statuses[-1]

    with sink(take) as url:
        yield url, bodies, statuses


@pytest.fixture
def alertmanager(alertmanager_command, tmp_path, notified):
    """URL of a real Alertmanager that sends everything on."""
    configuration, address = tmp_path / "alertmanager.yml", free_address()
    configuration.write_text(CONFIGURATION.replace("URL", notified[0]))
    command = [
        *alertmanager_command, f"--config.file={configuration}", f"--storage.path={tmp_path / 'data'}",
        f"--web.listen-address={address}", "--cluster.listen-address=",
    ]  # fmt: skip
    with running(command, tmp_path / "log", f"http://{address}/-/ready"):
        yield f"http://{address}"


def until(condition, seconds=60.0):
    """Wait for something to happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_an_alert_fires_and_resolves_through_a_real_alertmanager(
    alertmanager, notified, connection, make_contract, make_verdict
):
    _, bodies, statuses = notified
    now = time.time()
    contract = make_contract([{"on": "fail", "severity": "critical", "do": [{"webhook": "am"}]}])
    state, fired = advance(contract, PolicyState(contract.name), [make_verdict("FAIL", at=now)], {}, now - 5)
    _, resolved = advance(contract, state, [make_verdict("PASS", at=now)], {}, now)
    outbox = Outbox(connection)
    endpoint = WebhookEndpoint("am", alertmanager, format=Format.ALERTMANAGER, allow_private=True)

    def deliver(transitions):
        outbox.enqueue("am", contract.name, encode(alert_body(contract, transitions, receiver="am")), time.time())

        async def main():
            dispatcher = Dispatcher(outbox, {"am": endpoint})
            await drain(dispatcher)
            await dispatcher.aclose()

        asyncio.run(main())
        assert outbox.messages(DeliveryState.WAITING) == (), outbox.messages(DeliveryState.WAITING)

    deliver(fired)
    (active,) = httpx.get(f"{alertmanager}/api/v2/alerts").json()
    assert active["status"]["state"] == "active"
    assert active["labels"]["clause"] == "token-tv"
    until(lambda: bodies)
    assert (bodies[0]["version"], bodies[0]["status"]) == ("4", "firing")
    said = f"policy-7b: token-tv is broken on slice code for {'b' * 12} against {'a' * 12}"
    assert bodies[0]["alerts"][0]["annotations"]["summary"] == said

    deliver(resolved)
    until(lambda: any(body["status"] == "resolved" for body in bodies))
    assert set(statuses) == {204}
    assert json.loads(json.dumps(bodies[-1]))["alerts"][0]["status"] == "resolved"
