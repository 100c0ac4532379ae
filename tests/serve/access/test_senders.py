"""OTLP with tokens, over both transports: who is let in, how the others are told, and that what they send arrives."""

import asyncio
from collections import Counter

import grpc
import httpx
import pytest
from google.rpc.status_pb2 import Status

from tests.serve.receivers.conftest import RecordingSink
from tests.tools.access import access_of, token_of
from tests.tools.receivers import http_app, start_grpc

EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


@pytest.fixture
def senders(tmp_path):
    """Who is let in: one who sends, and one who only reads and acts."""
    return access_of(tmp_path, sender="send", reader="read act")


def over_grpc(sink, senders, counts, header, body):
    async def send():
        server, port = await start_grpc(sink, port=0, counts=counts, access=senders)
        metadata = () if header is None else (("authorization", header),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await channel.unary_unary(EXPORT)(body, metadata=metadata, timeout=10)
            except grpc.aio.AioRpcError as error:
                return error.code().value[0], str(error.details())
            finally:
                await server.stop(0)
        return 0, ""

    return asyncio.run(send())


def over_http(sink, senders, counts, header, body):
    """The code and message of the answer, whose status is the one that belongs to it."""

    async def send():
        transport = httpx.ASGITransport(http_app(sink, counts=counts, access=senders))
        headers = {"content-type": "application/x-protobuf"} | ({} if header is None else {"authorization": header})
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/v1/metrics", content=body, headers=headers)

    answer = asyncio.run(send())
    if answer.status_code == 200:
        return 0, ""
    found = Status.FromString(answer.content)
    assert answer.status_code == {16: 401, 7: 403}[found.code]
    assert answer.headers.get("www-authenticate") == ("Bearer" if found.code == 16 else None)
    return found.code, found.message


@pytest.mark.parametrize(("name", "over"), [("grpc", over_grpc), ("http", over_http)])
@pytest.mark.parametrize(
    ("header", "code", "outcome"),
    [
        (None, 16, "unauthenticated"),
        ("Bearer kc_guess", 16, "unauthenticated"),
        (f"Basic {token_of('sender')}", 16, "unauthenticated"),
        (f"Bearer {token_of('reader')}", 7, "forbidden"),
    ],
)
def test_who_may_not_send_is_told_and_counted(senders, name, over, header, code, outcome):
    """UNAUTHENTICATED or PERMISSION_DENIED, neither of which is sent again; nothing reaches the judge."""
    sink, counts = RecordingSink(), Counter()
    found, message = over(sink, senders, counts, header, b"not even read")
    assert found == code
    assert not any(token_of(name) in message for name in ("sender", "reader"))
    assert sink.requests == []
    assert counts == {(name, outcome): 1}
