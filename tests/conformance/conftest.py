"""Does a server speak OTLP? A conformance suite for receivers, from the text of the specification, version 1.11.

    python -m pytest tests/conformance --target http://127.0.0.1:4318 --grpc-target 127.0.0.1:4317

It sends requests and judges the answers: over HTTP in protobuf and JSON, and over gRPC, with and without gzip. It needs
pytest, grpcio, opentelemetry-proto and googleapis-common-protos, and sees nothing of the server but its ports: any
receiver can be its target, and a few kilobytes of made-up telemetry arrive there. Without a target it starts the
evaluator of this repository.

Each test is one requirement: its docstring says it in our words, and its marker says the level that the specification
gives it and the section where it stands. `must`, `should` (RECOMMENDED among them) and `may` are the capital words of
RFC 2119; where OTLP leaves something to HTTP, the section is one of RFC 9110 or 9112. A `may` fails only where it is
done wrongly, and is skipped where it is not done at all. Choose levels with `-m must` or `-m "must or should"`. What
only clients are asked for, and what no client can see, is not in here.

At the end stands how many requirements of each level are met, and which are not. A requirement is met if every signal
and encoding of its test passes; it is open if it could not be tried, because the server could not be brought to it.

    --target URL            the OTLP/HTTP server; or the environment's OTLP_TARGET
    --grpc-target HOST:PORT the OTLP/gRPC server; or OTLP_GRPC_TARGET. Either may be left out: its tests are skipped
    --limit-mib N           the largest request that the target takes, if it is configured to less than 64 MiB
    --partly-wrong FILE     metrics in OTLP/JSON of which the target takes a part only: what is wrong with data is the
                            receiver's own business, so partial success cannot be tried without it
    --deviations FILE       JSON, from a test, as `test_grpc.py::test_limit` or with its [parameters], to why this
                            target is known to fail it. These must fail, all others must pass: so a table of what a
                            server meets stays true

Files: payloads.py is what is sent, clients.py who sends it; the tests are by subject, and known/ holds the deviations
of servers that were tried.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conformance.clients import HttpClient
from tests.conformance.payloads import METRICS, to_protobuf

LEVELS = ("must", "should", "may")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """The server under test."""

    http: str | None
    grpc: str | None
    limit: int
    """Bytes of the largest request that it takes."""
    partly_wrong: dict[str, Any] | None
    """Metrics in OTLP/JSON of which it takes a part only."""
    own: bool
    """Whether it is this repository's, for which nothing may be left untried."""

    def untried(self, why: str) -> None:
        """A requirement could not be tried: skips the test, and fails it where that is nobody's fault but ours."""
        (pytest.fail if self.own else pytest.skip)(why)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("OTLP conformance")
    group.addoption("--target", metavar="URL", help="OTLP/HTTP server to test (OTLP_TARGET)")
    group.addoption("--grpc-target", metavar="HOST:PORT", help="OTLP/gRPC server to test (OTLP_GRPC_TARGET)")
    group.addoption("--limit-mib", type=int, default=64, metavar="N", help="largest request that the target takes")
    group.addoption("--partly-wrong", type=Path, metavar="FILE", help="OTLP/JSON metrics that it takes a part of")
    group.addoption("--deviations", type=Path, metavar="FILE", help="JSON: what the target is known to fail, and why")


def pytest_configure(config: pytest.Config) -> None:
    for level in LEVELS:
        config.addinivalue_line("markers", f"{level}(section): what the specification's section says with this word")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = not any(_addresses(config))
    deviations = config.getoption("--deviations", default=None)
    if deviations is None and own:
        deviations = Path(__file__).parent / "known" / "evaluator.json"
    known = {} if deviations is None else json.loads(deviations.read_text())
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        (mark,) = [mark for mark in item.iter_markers() if mark.name in LEVELS]
        says = " ".join(item.function.__doc__.split())
        test = f"{item.path.name}::{item.originalname}"
        item.user_properties.append(("requirement", (mark.name.upper(), mark.args[0], test, says)))
        if (why := known.get(f"{item.path.name}::{item.name}", known.get(test))) is not None:
            item.add_marker(pytest.mark.xfail(reason=why, strict=True))
        if own:
            item.add_marker(pytest.mark.slow)  # the evaluator's start


def pytest_terminal_summary(terminalreporter: Any) -> None:
    outcomes: dict[tuple[str, ...], set[str]] = {}
    for outcome in ("passed", "failed", "error", "xfailed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, value in getattr(report, "user_properties", ()):
                if key == "requirement":
                    outcomes.setdefault(tuple(value), set()).add(outcome)
    if not outcomes:
        return
    terminalreporter.section("OTLP 1.11")
    for level in (name.upper() for name in LEVELS):
        found = {key: value for key, value in sorted(outcomes.items()) if key[0] == level}
        unmet = [key for key, value in found.items() if value & {"failed", "error", "xfailed"}]
        untried = [key for key, value in found.items() if value == {"skipped"}]
        met = len(found) - len(unmet) - len(untried)
        terminalreporter.write_line(f"{level:6} {met} met, {len(unmet)} not met, {len(untried)} open")
        for word, keys in (("not met", unmet), ("open", untried)):
            for _, section, test, says in keys:
                terminalreporter.write_line(f"       {word}: {says} [{section}; {test}]")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The server under test; this repository's evaluator unless another is named."""
    option = request.config.getoption
    http, grpc_target = _addresses(request.config)
    if http or grpc_target:
        wrong = option("--partly-wrong", default=None)
        limit = option("--limit-mib", default=64) << 20
        yield Target(http, grpc_target, limit, wrong and json.loads(wrong.read_text()), own=False)
        return
    command = [
        *(sys.executable, "-m", "kc_otel", "serve", str(ROOT / "contracts" / "serving-int8.yaml"), "--no-webhooks"),
        *("--state", ":memory:", "--grpc-port", "0", "--http-port", "0", "--api-port", "0"),
        *("--max-request", "8"),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            for line in process.stderr or ():
                said += line
                if found := re.search(r"OTLP/gRPC (\S+), OTLP/HTTP (\S+), API", line):
                    break
            else:
                pytest.fail(f"kc-otel serve ended: {said}")
            yield Target(found[2], found[1], 8 << 20, _of_an_unknown_contract(), own=True)
        finally:
            process.terminate()
            process.communicate()


@pytest.fixture
def http(target: Target) -> Iterator[HttpClient]:
    """One connection to the OTLP/HTTP server."""
    if target.http is None:
        pytest.skip("no --target")
    client = HttpClient(target.http)
    yield client
    client.close()


@pytest.fixture
def channel(target: Target) -> Iterator[grpc.Channel]:
    """One channel to the OTLP/gRPC server, which sends requests of any size."""
    if target.grpc is None:
        pytest.skip("no --grpc-target")
    with grpc.insecure_channel(target.grpc, [("grpc.max_send_message_length", -1)]) as made:
        yield made


@pytest.fixture
def partly_wrong(target: Target) -> dict[str, Any]:
    """Metrics in OTLP/JSON of which the target takes a part only."""
    if target.partly_wrong is None:
        pytest.skip("no --partly-wrong: what this server takes only a part of is not known")
    to_protobuf(METRICS, target.partly_wrong)
    return target.partly_wrong


def _addresses(config: pytest.Config) -> tuple[str | None, str | None]:
    # Options of a folder's own conftest exist only where that folder is named on the command line.
    http = config.getoption("--target", default=None) or os.environ.get("OTLP_TARGET")
    return http, config.getoption("--grpc-target", default=None) or os.environ.get("OTLP_GRPC_TARGET")


def _of_an_unknown_contract() -> dict[str, Any]:
    contract = {"key": "kc.contract", "value": {"stringValue": "nobody"}}
    point = {"timeUnixNano": "1700000000000000000", "count": "1", "scale": 0, "attributes": [contract]}
    histogram = {"aggregationTemporality": 2, "dataPoints": [point]}
    metric = {"name": "kc.drift.k3", "exponentialHistogram": histogram}
    return {"resourceMetrics": [*METRICS.json["resourceMetrics"], {"scopeMetrics": [{"metrics": [metric]}]}]}
