"""Evaluators that take played exports over OTLP/HTTP and are told the time: their `/metrics`, and what is behind it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from starlette.testclient import TestClient

from kc_otel.client.webhooks import Secret
from kc_otel.contract.model import Contract
from kc_otel.judge.otlp.sink import ExportResult
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.verdict import Verdict
from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.routes_decisions import Changes
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_file import open_state
from kc_otel.serve.webhooks.deliver import Dispatcher
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from tests.tools.deliveries import drain
from tests.tools.panel_traffic import ENGINE, STEP, Recorded
from tests.tools.receivers import http_app

TICK = 10
"""Seconds between two evaluations; each is followed by a look at the page."""
_OTLP = {"content-type": "application/x-protobuf"}


@dataclass(frozen=True)
class Moment:
    at: int
    page: bytes
    cells: tuple[tuple[Verdict, float], ...]


class _Told(Core):
    """An evaluator that takes what arrives at the time that is played."""

    clock = 0.0

    def metrics(self, request: Any) -> ExportResult:
        return self.evaluator.ingest_metrics(request, self.clock)


def judge(contracts: Sequence[Contract], recorded: Recorded, begin: int, late: int, pager: str) -> Iterator[Moment]:
    """Judge, route, escalate and promote from `begin` to the last export, Unix seconds; a moment per evaluation.

    What happens is about the first contract. Exports arrive `late` seconds late; the only endpoint is `pager`.
    """
    requests = Counter()
    with closing(open_state(None)) as connection:
        core = _Told(contracts, connection, external_url="http://evaluator", now=begin)
        endpoint = WebhookEndpoint("pager", pager, (Secret(bytes(range(32))),), allow_private=True)
        dispatcher = Dispatcher(core.outbox, {"pager": endpoint}, clock=lambda: core.clock)
        api = make_api(core, lambda: read(core, requests, dispatcher.attempts), Changes(), "0")
        otlp = TestClient(http_app(core, counts=requests))  # it has no lifespan to enter
        with TestClient(api) as reader:
            for now in range(begin, recorded.end + 1, TICK):
                core.clock = now
                _receive(otlp, recorded, now - late)
                core.tick(now)
                core.evaluator.faults.counts[contracts[0].name] += 3
                if now == recorded.end - 2 * STEP:
                    _promote(core, contracts[0].name, recorded)
                asyncio.run(_deliver(dispatcher))
                yield Moment(
                    at=now,
                    page=reader.get("/metrics").content,
                    cells=tuple((verdict, since) for verdict, since in core.history.cells()),
                )


def _receive(otlp: TestClient, recorded: Recorded, at: int) -> None:
    """What was exported at a time: by every recorder, the last of them twice, and with it what nobody can read."""
    arriving = [export for export in recorded.exports if export.at == at and export.recorder != ENGINE]
    for export in (*arriving, *arriving[-1:]):
        content = export.request.SerializeToString()
        assert otlp.post("/v1/metrics", content=content, headers=_OTLP).status_code == 200
    if arriving:
        assert otlp.post("/v1/metrics", content=b"\xff", headers=_OTLP).status_code == 400


def _promote(core: _Told, contract: str, recorded: Recorded) -> None:
    """One version is rolled back; the next is forced into the canary."""
    back, on = (recorded.kernels[name][1].fingerprint for name in ("int4", "bf16"))
    core.promotions.start(contract, back, "ada", core.clock)
    core.promotions.tell(contract, back, "rollback", "ada", "it drifts", core.clock)
    core.promotions.start(contract, on, "ada", core.clock)
    core.promotions.tell(contract, on, "force", "ada", "it has been looked at", core.clock, stage=Stage.CANARY)


async def _deliver(dispatcher: Dispatcher) -> None:
    await drain(dispatcher)
    await dispatcher.aclose()
