"""A sink that remembers, requests to send it, and the protocol's own example payloads."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.internal.encoder import _VarintBytes

from kc_otel.judge.otlp.requests import ExportResult, MetricsSink


class RecordingSink(MetricsSink):
    """Remembers what it got; answers, or raises, what it is told to."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.answer: ExportResult | Exception = ExportResult()

    async def metrics(self, request: Any) -> ExportResult:
        self.requests.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def wrapped(content: bytes, *fields: int) -> bytes:
    for number in fields:
        content = bytes((number << 3 | 2,)) + _VarintBytes(len(content)) + content
    return content


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def examples() -> Path:
    """Folder of opentelemetry-proto's example payloads."""
    return Path(__file__).resolve().parents[2] / "data" / "otlp-examples"
