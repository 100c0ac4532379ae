"""The Health dashboard: data that exporters and evaluator received, dropped and refused, and their backlog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.prometheus_names import label, prometheus_name, selector
from kc_otel.contract.registry.clause_metrics import QUANTITIES
from kc_otel.contract.registry.own_metrics import METRICS
from kc_otel.contract.slices import OTHER
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.boards import STEP, board_file, scope, step
from kc_otel.generate.grafana.panels import (
    Query,
    graph_panel,
    legend,
    limit_line,
    stat_panel,
    state_panel,
    table_panel,
    thresholds,
)
from kc_otel.generate.grafana.sdk import dashboard
from kc_otel.generate.links import EVALUATED_ID, HEALTH_UID, INVALID_INPUT_ID, MISSING_ID
from kc_otel.generate.state_alerts import AGE, FRESH_SECONDS

_USED_OUTCOMES: Final = "accepted|baseline"
_EVALUATOR: Final = "From the evaluator's own metrics."
_RECORDERS: Final = "From the recorders, by way of the Collector."


def health_file() -> GeneratedFile:
    """The dashboard; it is the same for all contracts."""
    rows = (
        (90, "Evaluator: input, and time to judge it", _evaluator()),
        (91, "Evaluator: webhooks", _webhooks()),
        (92, "Recorders: what was measured, and what was not", _recorders()),
    )
    return board_file(
        HEALTH_UID,
        "Whether what the other dashboards show can be trusted: received, dropped, refused, late, waiting.",
        (scope(slices=False)[0], step()),
        (*_counts(), *(part for id, title, panels in rows for part in (dashboard.Row(title).id(id), *panels))),
    )


def evaluator_panel(id: int) -> Any:
    """The first thing to look at: how old what the evaluator says is, and whether there is one."""
    about = (
        "Time since the last evaluation. Without a running evaluator, everything on these boards is unknown: restart "
        "it (handbook, On call)."
    )
    colours = thresholds("green", (30.0, "orange"), (FRESH_SECONDS, "red"))
    return state_panel(id, "Evaluated", about, AGE, legend="ago", unit="s", colours=colours).decimals(0)


def points_panel(id: int) -> Any:
    """Data points that count; none means that nothing is measured."""
    accepted = queries.now(queries.rate("kc.evaluator.points", (), _outcome(_USED_OUTCOMES)))
    about = "Data points per second that the evaluator counts. At zero nothing is measured: do not trust green panels."
    return state_panel(id, "Points used", about, accepted, unit="cps", colours=thresholds("red", (1e-9, "green")))


def invalid_panel(id: int) -> Any:
    """Sequences that failed an input check."""
    about = f"Sequences in the range whose two sides cannot be compared; they do not count as drift. {_RECORDERS}"
    return stat_panel(id, "Invalid input", about, queries.increase("kc.input.invalid"), "orange")


def _counts() -> Iterator[Any]:
    yield evaluator_panel(EVALUATED_ID)
    yield points_panel(1)
    refused = queries.now(queries.rate("kc.evaluator.points", (), _outcome(_USED_OUTCOMES, no=True)))
    about = f"Ignored, duplicate, late, rejected. {_EVALUATOR}"
    yield stat_panel(2, "Points not used", about, refused, "orange").unit("cps").decimals(2)
    waiting, about = queries.now(queries.health("kc.outbox.pending")), METRICS["kc.outbox.pending"].meaning
    yield stat_panel(3, "Webhooks waiting", about, waiting, "orange", span=2)
    tick = queries.now(queries.health("kc.evaluator.tick.duration", how="max"))
    about, colours = METRICS["kc.evaluator.tick.duration"].meaning, thresholds("green", (1.0, "yellow"), (5.0, "red"))
    yield state_panel(4, "Evaluation takes", about, tick, unit="s", colours=colours)
    yield invalid_panel(5)
    for id, title, name in (
        (6, "Batches dropped", "kc.recorder.dropped"),
        (7, "Exports refused", "kc.recorder.export.failures"),
    ):
        about = f"{METRICS[name].meaning} In the range. {_RECORDERS}"
        yield stat_panel(id, title, about, queries.increase(name), "orange", span=2)
    share = queries.health("kc.recorder.sampling", how="min")
    about = f"{METRICS['kc.recorder.sampling'].meaning} The smallest. {_RECORDERS}"
    yield state_panel(8, "Measured share", about, share, unit="percentunit")


def _evaluator() -> Iterator[Any]:
    yield _rates(20, "Points received", "kc.evaluator.points", ("kc.outcome",), "cps", _EVALUATOR).span(6)
    of = METRICS["kc.evaluator.missing"].attributes
    yield _gauge(MISSING_ID, "Senders not judged", "kc.evaluator.missing", of, "short", _EVALUATOR, "max").span(6)
    of = METRICS["kc.evaluator.silent"].attributes
    yield _gauge(47, "Silent recorders", "kc.evaluator.silent", of, "short", _EVALUATOR, "max").span(6)
    yield _rates(
        21, "OTLP requests", "kc.evaluator.requests", ("kc.transport", "kc.outcome"), "reqps", _EVALUATOR
    ).span(6)
    kept, allowed = "kc.evaluator.series", "kc.evaluator.series.limit"
    about = f"{METRICS[kept].meaning} The dashed line: {METRICS[allowed].meaning.lower()} {_EVALUATOR}"
    series = (Query(queries.health(kept), "streams"), Query(queries.health(allowed), "limit"))
    yield limit_line(graph_panel(22, "Streams", about, series, "short"), "/^limit$/").span(8)
    yield _gauge(23, "Duration of an evaluation", "kc.evaluator.tick.duration", (), "s", _EVALUATOR, "max").span(8)
    yield _rates(35, "Failures to judge", "kc.evaluator.failures", ("kc.contract",), "cps", _EVALUATOR).span(8)
    free = f"Empty without a state file. {_EVALUATOR}"
    yield _gauge(37, "Not in the snapshot yet", "kc.evaluator.inbox.size", (), "bytes", free).span(12)
    yield _gauge(41, "Requests in flight", "kc.evaluator.in_flight", (), "bytes", _EVALUATOR).span(12)
    yield _gauge(42, "Left on the disk", "kc.evaluator.disk.free", (), "bytes", free, "min").span(12)
    yield _gauge(43, "The disk takes for the state", "kc.evaluator.sync.duration", (), "s", free, "max").span(12)
    shards = "Empty where streams are in the evaluator's process."
    behind, streams = "kc.evaluator.shard.lag", "kc.evaluator.shard.streams"
    of = ("kc.shard",)
    yield _gauge(38, "Shards: bytes behind", behind, of, "bytes", f"{shards} {_EVALUATOR}", "max").span(12)
    yield _gauge(39, "Shards: streams", streams, of, "short", f"{shards} {_EVALUATOR}", "max").span(12)


def _webhooks() -> Iterator[Any]:
    unit = "suffix: message"
    outcome = ("kc.endpoint", "kc.outcome")
    yield _gauge(24, "Webhooks waiting, by endpoint", "kc.outbox.pending", outcome[:1], unit, _EVALUATOR).span(8)
    name = "kc.outbox.disabled"
    disabled = Query(f"time() - {queries.health(name, outcome[:1], 'max')}", legend(*outcome[:1]))
    yield graph_panel(48, "Endpoints disabled for", f"{METRICS[name].meaning} {_EVALUATOR}", (disabled,), "s").span(8)
    yield _rates(25, "Webhook deliveries", "kc.outbox.attempts", outcome, "cps", _EVALUATOR).span(8)


def _recorders() -> Iterator[Any]:
    of, why = ("kc.contract",), ("kc.contract", "kc.reason")
    tokens = "suffix: tokens/s"
    yield _rates(26, "Tokens measured", "kc.recorder.tokens", of, tokens, _RECORDERS, STEP).span(8)
    matchers = ", ".join((*queries.picked(of), f'{label("kc.slice")}="{OTHER}"'))
    over = f"rate({prometheus_name(QUANTITIES['tv_token'])}{{{matchers}}}[$__rate_interval])"
    yield graph_panel(
        31,
        "Tokens counted as `other`",
        "Tokens per second on slices over the contract's cap: they are counted together as `other`, and no clause is "
        f"judged on it. Anything here means that the cap hides what you asked to see. {_RECORDERS}",
        (Query(f"histogram_count({queries.by(of, over, 'sum')})", legend(*of), step=STEP),),
        tokens,
    ).span(8)
    yield _gauge(29, "Share of batches measured", "kc.recorder.sampling", of, "percentunit", _RECORDERS, "min").span(8)
    yield _rates(
        INVALID_INPUT_ID, "Invalid sequences, by reason", "kc.input.invalid", why, "cps", _RECORDERS, STEP
    ).span(12)
    outcome = ("kc.contract", "kc.outcome")
    yield _rates(45, "Prompts that counted", "kc.recorder.prompts", outcome, "cps", _RECORDERS, STEP).span(12)
    yield _rates(27, "Batches dropped, by reason", "kc.recorder.dropped", why, "cps", _RECORDERS, STEP).span(12)
    yield _rates(28, "Exports refused, per second", "kc.recorder.export.failures", of, "cps", _RECORDERS, STEP).span(12)
    yield _rates(33, "Requests captured in engines", "kc.capture.recorded", of, "reqps", _RECORDERS, STEP).span(12)
    yield _rates(34, "Requests not captured, by reason", "kc.capture.dropped", why, "reqps", _RECORDERS, STEP).span(12)
    titles = {"kc.contract": "Contract", "kc.kernel.role": "Role", "kc.kernel.version": "Version"}
    yield (
        table_panel(
            30,
            "Kernel versions",
            f"{METRICS['kc.kernel.info'].meaning} Other panels show the short fingerprint only. {_RECORDERS}",
            {"Info": f"{selector('kc.kernel.info', None, *queries.picked(of))} == 1"},
            {label(name): title for name, title in titles.items()},
            {},
            hide=("Value", "__name__", "job", "instance"),
            height=8,
        )
    )


def _rates(id: int, title: str, name: str, attributes: tuple[str, ...], unit: str, source: str, least: str = "") -> Any:
    query = Query(queries.rate(name, attributes), legend(*attributes), step=least)
    return graph_panel(id, title, f"{METRICS[name].meaning} Per second. {source}", (query,), unit)


def _gauge(
    id: int, title: str, name: str, attributes: tuple[str, ...], unit: str, source: str, how: str = "sum"
) -> Any:
    query = Query(queries.health(name, attributes, how), legend(*attributes) or title.lower())
    return graph_panel(id, title, f"{METRICS[name].meaning} {source}", (query,), unit)


def _outcome(pattern: str, *, no: bool = False) -> str:
    return f'{label("kc.outcome")}{"!~" if no else "=~"}"{pattern}"'
