"""Panels on the evaluator and the recorders themselves: what they received, dropped, refused and still have to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kc_otel.contract.registry import METRICS
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.panels import Query, grafana_unit, graph_panel, table_panel
from kc_otel.generate.names import label

__all__ = ["health_panels"]


def health_panels() -> Iterator[Any]:
    """Panels with ids from 20, for the last row of the overview."""
    yield _rates(20, "Points received", "kc.evaluator.points", ("kc.outcome",), "cps")
    yield _rates(21, "OTLP requests", "kc.evaluator.requests", ("kc.transport", "kc.outcome"), "reqps")
    yield _gauge(22, "Streams", "kc.evaluator.series", (), "short")
    yield _gauge(23, "Duration of an evaluation", "kc.evaluator.tick.duration", (), "s", "max")
    yield _gauge(24, "Webhooks waiting", "kc.outbox.pending", ("kc.endpoint",), grafana_unit("{message}"))
    yield _rates(25, "Webhook deliveries", "kc.outbox.attempts", ("kc.endpoint", "kc.outcome"), "cps")
    yield _rates(26, "Tokens measured", "kc.recorder.tokens", ("kc.contract",), "suffix: tokens/s", contract=True)
    yield _rates(27, "Batches dropped", "kc.recorder.dropped", ("kc.contract", "kc.reason"), "cps", contract=True)
    yield _rates(28, "Exports refused", "kc.recorder.export.failures", ("kc.contract",), "cps", contract=True)
    yield _gauge(29, "Share of batches measured", "kc.recorder.sampling", ("kc.contract",), "percentunit", "min")
    yield (
        table_panel(
            30,
            "Kernel versions",
            f"{METRICS['kc.kernel.info'].meaning} Other panels show the short fingerprint only.",
            {"Info": queries.info()},
            {
                label("kc.contract"): "Contract",
                label("kc.kernel.role"): "Role",
                label("kc.kernel.version"): "Version",
            },
            {},
            hide=("Value", "__name__", "job", "instance"),
        )
        .height(8)
        .span(16)
    )


def _rates(id: int, title: str, name: str, attributes: tuple[str, ...], unit: str, *, contract: bool = False) -> Any:
    description = f"{METRICS[name].meaning} Per second."
    return graph_panel(
        id, title, description, (Query(queries.rate(name, attributes, contract=contract), _legend(attributes)),), unit
    )


def _gauge(id: int, title: str, name: str, attributes: tuple[str, ...], unit: str, how: str = "sum") -> Any:
    query = Query(queries.health(name, attributes, how), _legend(attributes) or title.lower())
    return graph_panel(id, title, METRICS[name].meaning, (query,), unit)


def _legend(attributes: tuple[str, ...]) -> str:
    return " · ".join(f"{{{{{label(name)}}}}}" for name in attributes)
