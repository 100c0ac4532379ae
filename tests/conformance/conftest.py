"""OTLP as the text of the specification has it, version 1.11: requests to the evaluator, and what it answers.

They are sent over HTTP in protobuf and JSON, and over gRPC, with and without gzip, to a process of which only its ports
are seen. Each test is one requirement: its docstring says it in our words, and its marker says the level that the
specification gives it and the section where it stands. `must`, `should` (RECOMMENDED among them) and `may` are the
capital words of RFC 2119; where OTLP leaves something to HTTP, the section is one of RFC 9110 or 9112. What only
clients are asked for, and what no client can see, is not in here; nor is a request of 32 MiB, for the evaluator's own
limit is 16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conformance.clients import HttpClient
from tests.conformance.payloads import METRICS
from tests.integration.conftest import Evaluator

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """Addresses of the server under test."""

    http: str
    grpc: str
    limit: int = 8 << 20
    """Bytes of the largest request that it takes."""


def pytest_configure(config: pytest.Config) -> None:
    for level in ("must", "should", "may"):
        config.addinivalue_line("markers", f"{level}(section): what the specification's section says with this word")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)  # the evaluator's start


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    contract = ROOT / "contracts" / "serving-int8.yaml"
    evaluator = Evaluator(contract, Path(":memory:"), {}, "--no-webhooks", "--max-request", "8")
    yield Target(evaluator.http, evaluator.grpc)
    evaluator.stop()


@pytest.fixture
def http(target: Target) -> Iterator[HttpClient]:
    client = HttpClient(target.http)
    yield client
    client.close()


@pytest.fixture
def channel(target: Target) -> Iterator[grpc.Channel]:
    """One channel to the OTLP/gRPC server, which sends requests of any size."""
    with grpc.insecure_channel(target.grpc, [("grpc.max_send_message_length", -1)]) as made:
        yield made


@pytest.fixture
def partly_wrong() -> dict[str, Any]:
    """Metrics in OTLP/JSON of which the evaluator takes a part only: the contract of one is not served."""
    contract = {"key": "kc.contract", "value": {"stringValue": "nobody"}}
    point = {"timeUnixNano": "1700000000000000000", "count": "1", "scale": 0, "attributes": [contract]}
    histogram = {"aggregationTemporality": 2, "dataPoints": [point]}
    metric = {"name": "kc.drift.k3", "exponentialHistogram": histogram}
    return {"resourceMetrics": [*METRICS.json["resourceMetrics"], {"scopeMetrics": [{"metrics": [metric]}]}]}
