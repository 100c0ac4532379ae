"""The evaluator's receivers by themselves: one sink, a budget of their own, no TLS."""

from collections import Counter

import grpc

from kc_otel.judge.otlp.requests import Limits, MetricsSink
from kc_otel.serve.access.access_file import AccessFile
from kc_otel.serve.access.site_guard import HostNames
from kc_otel.serve.receivers.grpc_server import serve_grpc
from kc_otel.serve.receivers.http_server import HttpReceiver
from kc_otel.serve.receivers.request_taker import ByteBudget, RequestTaker

__all__ = ["http_app", "start_grpc"]


def http_app(
    sink: MetricsSink,
    limits: Limits | None = None,
    counts: Counter[tuple[str, str]] | None = None,
    names: HostNames | None = None,
    access: AccessFile | None = None,
) -> HttpReceiver:
    limits = limits or Limits()
    taker = RequestTaker(sink, limits, ByteBudget(limits), access)
    return HttpReceiver(taker, Counter() if counts is None else counts, names)


async def start_grpc(
    sink: MetricsSink,
    port: int = 0,
    limits: Limits | None = None,
    counts: Counter[tuple[str, str]] | None = None,
    access: AccessFile | None = None,
) -> tuple[grpc.aio.Server, int]:
    limits = limits or Limits()
    taker = RequestTaker(sink, limits, ByteBudget(limits), access)
    return await serve_grpc(taker, "127.0.0.1", port, Counter() if counts is None else counts)
