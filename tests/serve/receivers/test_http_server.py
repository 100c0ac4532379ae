"""OTLP over HTTP: status codes and bodies as the specification has them, in the request's own encoding."""

import asyncio
import gzip
import json
from collections import Counter
from typing import Any

import httpx
import pytest
from google.rpc.status_pb2 import Status

from kc_otel.judge.otlp.requests import Limits
from kc_otel.serve.access.site_guard import HostNames
from kc_otel.serve.receivers import http_server
from kc_otel.serve.receivers.http_server import HttpReceiver
from kc_otel.serve.receivers.request_taker import ByteBudget, RequestTaker
from tests.tools.receivers import http_app

pytestmark = pytest.mark.anyio

PROTOBUF, JSON = "application/x-protobuf", "application/json"
SMALL = Limits(max_bytes=2000)


def call(app: Any, method: str, path: str, body: Any = b"", **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kc") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, content=body, headers=named)

    return asyncio.run(send())


def status(response: httpx.Response) -> tuple[int, str]:
    if response.headers["content-type"] == PROTOBUF:
        found = Status.FromString(response.content)
        return found.code, found.message
    tree = response.json()
    return tree["code"], tree["message"]


async def _turns_of_others(app: Any, content: bytes, headers: dict[str, str]) -> tuple[httpx.Response, int]:
    """The answer to a request, and how often others had a turn meanwhile."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kc") as client:
        asked, turns = asyncio.create_task(client.post("/v1/metrics", content=content, headers=headers)), 0
        while not asked.done():
            await asyncio.sleep(0.001)  # as health, which waits for nobody
            turns += 1
        return await asked, turns


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_long_json_holds_nobody_up(sink: Any, encoding: str) -> None:
    """It is read on a thread: others have turns meanwhile, and what arrives is what JSON said."""
    attributes = [{"key": f"a{i}", "value": {"stringValue": "b"}} for i in range(200)]
    metrics = [{"name": "kc.tokens", "sum": {"dataPoints": [{"asInt": "1", "attributes": attributes}] * 200}}]
    body = json.dumps({"resourceMetrics": [{"scopeMetrics": [{"metrics": metrics}]}]}).encode()
    headers = {"content-type": JSON, "content-encoding": encoding}
    content = gzip.compress(body) if encoding else body
    answer, turns = asyncio.run(_turns_of_others(http_app(sink), content, headers))
    assert (answer.status_code, answer.json()) == (200, {})
    assert turns > 20
    metrics = [request.resource_metrics[0].scope_metrics[0].metrics[0] for request in sink.requests]
    assert sum(len(metric.sum.data_points) for metric in metrics) == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "expected", "outcome"),
    [
        ("GET", "/v1/metrics", b"", {}, 405, "not_allowed"),
        ("POST", "/v1/profiles", b"", {"content_type": JSON}, 404, "not_found"),
        ("POST", "/v1/metrics", b"", {"content_type": "text/plain"}, 415, "unsupported_media"),
        ("POST", "/v1/metrics", b"", {"content_type": PROTOBUF, "content_encoding": "br"}, 415, "unsupported_media"),
        ("POST", "/v1/metrics", b"\x0a\xff", {"content_type": PROTOBUF}, 400, "bad_request"),
        ("POST", "/v1/metrics", b"x", {"content_type": JSON, "content_encoding": "gzip"}, 400, "bad_request"),
        ("POST", "/v1/metrics", bytes(90_000), {"content_type": PROTOBUF}, 413, "too_large"),
        (
            "POST", "/v1/metrics", gzip.compress(bytes(2001), mtime=0),
            {"content_type": JSON, "content_encoding": "gzip"}, 413, "too_large",
        ),
    ],
)  # fmt: skip
def test_refusals(sink, method, path, body, headers, expected, outcome):
    """Every refusal has its status, a google.rpc.Status that says why, and its count; the sink sees nothing."""
    counts = Counter()
    response = call(http_app(sink, SMALL, counts), method, path, body, **headers)
    code, message = status(response)
    assert response.status_code == expected
    assert response.headers["content-type"] == (PROTOBUF if headers.get("content_type") == PROTOBUF else JSON)
    assert code > 0
    assert len(message) > 10
    assert counts == {("http", outcome): 1}
    assert sink.requests == []
    assert (response.headers.get("allow") == "POST") == (expected == 405)


@pytest.mark.parametrize("long", [False, True])
async def test_what_is_over_the_budget_is_told_to_come_back(sink, monkeypatch, long):
    """Short bodies are counted as they come, long ones whole; what has no room is 503, and nothing of it is taken."""
    monkeypatch.setattr(http_server, "_LONG_BYTES", 600 if long else 1000)
    limits = Limits(max_bytes=1000, retry_after=2)
    budget = ByteBudget(limits, 1900)
    app = HttpReceiver(RequestTaker(sink, limits, budget), Counter(), None)
    go = asyncio.Event()

    async def slow() -> Any:
        yield bytes(700)
        await go.wait()

    async def post(content: Any, **more: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kc") as client:
            return await client.post("/v1/metrics", content=content, headers={"content-type": PROTOBUF, **more})

    declared = {"content-length": "900"} if long else {}
    first = asyncio.create_task(post(slow(), **declared))
    if not long:
        second = asyncio.create_task(post(slow()))
    while budget.in_flight < (900 if long else 1400):  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0.001)
    refused = await post(bytes(800))
    short = await post(b"")
    held = budget.in_flight
    go.set()
    if not long:
        await second
    answered = await first
    assert held == (900 if long else 1400)
    assert (answered.status_code, short.status_code) == (400, 200)
    assert (refused.status_code, refused.headers["retry-after"], status(refused)[0]) == (503, "2", 8)
    assert budget.in_flight == 0


def test_a_body_that_never_ends_is_given_up(sink: Any) -> None:
    app = http_app(sink, Limits(read_timeout=0.05))

    async def never() -> Any:
        yield b"x"
        await asyncio.sleep(60)

    response = call(app, "POST", "/v1/metrics", never(), content_type=PROTOBUF)
    assert (response.status_code, status(response)[0], response.headers["retry-after"]) == (503, 14, "1")


def test_a_sender_that_hangs_up_is_no_error(sink: Any) -> None:
    """A disconnect in the middle of a body is counted, and nothing is answered."""
    counts, sent = Counter(), []
    messages = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]
    scope = {"type": "http", "method": "POST", "path": "/v1/logs", "headers": [(b"content-type", PROTOBUF.encode())]}

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(http_app(sink, counts=counts)(scope, receive, send))
    assert sent == []
    assert counts == {("http", "disconnected"): 1}


def test_a_sink_that_fails_is_a_500_without_its_secrets(sink: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of ours is logged here and told without details there."""
    sink.answer = RuntimeError("password")
    response = call(http_app(sink), "POST", "/v1/metrics", content_type=PROTOBUF)
    assert response.status_code == 500
    assert "password" not in response.text
    assert "password" in caplog.text


@pytest.mark.parametrize("media", [PROTOBUF, JSON])
def test_a_name_that_is_not_ours_is_not_answered(sink: Any, media: str) -> None:
    """By DNS rebinding a page sends under a name of its own; the refusal is in the request's encoding."""
    counts = Counter()
    app = http_app(sink, counts=counts, names=HostNames(["evaluator"]))
    body = b"{}" if media == JSON else b""
    refused = call(app, "POST", "/v1/metrics", body, content_type=media, host="evil.example:4318")
    assert refused.status_code == 421
    assert status(refused)[0] == 7
    assert "--allowed-host" in status(refused)[1]
    assert sink.requests == []
    for host in ("evaluator:4318", "localhost:4318", "127.0.0.1:4318", "[::1]:4318"):
        assert call(app, "POST", "/v1/metrics", body, content_type=media, host=host).status_code == 200
    assert counts == {("http", "misdirected"): 1, ("http", "accepted"): 4}
