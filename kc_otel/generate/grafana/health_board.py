"""The Health dashboard: data that exporters and evaluator received, dropped and refused, and their backlog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kc_otel.contract.registry.clause_metrics import QUANTITIES
from kc_otel.contract.registry.own_metrics import METRICS, Instrument, label, prometheus_name, selector
from kc_otel.contract.slices import OTHER
from kc_otel.generate.alert_texts import FRESH_SECONDS
from kc_otel.generate.files import EVALUATED_ID, HEALTH_UID, INVALID_INPUT_ID, MISSING_ID, GeneratedFile
from kc_otel.generate.grafana import panels, queries
from kc_otel.generate.grafana.boards import STEP, board_file, scope, step
from kc_otel.generate.grafana.panels import legend, target, thresholds

_USED_OUTCOMES: Final = "accepted|baseline"
_KNOWN_OUTCOMES: Final = f"{_USED_OUTCOMES}|ignored"
"""Those of a fleet that is sound: what recorders say of themselves is ignored."""
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
        (*_counts(), *(part for id, title, shown in rows for part in (panels.row(id, title), *shown))),
    )


def evaluator_panel(id: int) -> Any:
    """The first thing to look at: how old what the evaluator says is, and whether there is one."""
    about = (
        "Longest time since the last evaluation of a picked contract. Without its evaluator, everything on these "
        "boards is unknown: restart it (handbook, On call). A contract that is gone counts for a day."
    )
    colours = thresholds("green", (30.0, "orange"), (FRESH_SECONDS, "red"))
    return panels.state(id, "Evaluated", about, queries.AGE, legend="ago", unit="s", colours=colours).decimals(0)


def points_panel(id: int) -> Any:
    """Data points that count; none means that nothing is measured."""
    accepted = queries.now(queries.rate("kc.evaluator.points", (), _outcome(_USED_OUTCOMES)))
    about = "Data points per second that the evaluator counts. At zero nothing is measured: do not trust green panels."
    colours = thresholds("red", (1e-9, "green"))
    return panels.state(id, "Points used", about, accepted, unit="cps", colours=colours)


def invalid_panel(id: int) -> Any:
    """Sequences that failed an input check."""
    about = f"Sequences in the range whose two sides cannot be compared; they do not count as drift. {_RECORDERS}"
    return panels.count(id, "Invalid input", about, queries.increase("kc.input.invalid"), "orange")


def _counts() -> Iterator[Any]:
    yield evaluator_panel(EVALUATED_ID)
    yield points_panel(1)
    refused = queries.now(queries.rate("kc.evaluator.points", (), _outcome(_KNOWN_OUTCOMES, no=True)))
    about = f"Duplicate, late, rejected. {_EVALUATOR}"
    yield panels.count(2, "Points not used", about, refused, "orange").unit("cps").decimals(2)
    waiting, about = queries.now(queries.health("kc.outbox.pending")), METRICS["kc.outbox.pending"].meaning
    yield panels.count(3, "Webhooks waiting", about, waiting, "orange", span=2)
    tick = queries.now(queries.health("kc.evaluator.tick.duration", how="max"))
    about, colours = METRICS["kc.evaluator.tick.duration"].meaning, thresholds("green", (1.0, "yellow"), (5.0, "red"))
    yield panels.state(4, "Evaluation takes", about, tick, unit="s", colours=colours)
    yield invalid_panel(5)
    for id, title, name in (
        (6, "Batches dropped", "kc.recorder.dropped"),
        (7, "Exports refused", "kc.recorder.export.failures"),
    ):
        about = f"{METRICS[name].meaning} In the range. {_RECORDERS}"
        yield panels.count(id, title, about, queries.increase(name), "orange", span=2)
    share = queries.health("kc.recorder.sampling", how="min")
    about = f"{METRICS['kc.recorder.sampling'].meaning} The smallest. {_RECORDERS}"
    yield panels.state(8, "Measured share", about, share, unit="percentunit")


def _evaluator() -> Iterator[Any]:
    yield _graph(20, 6, "Points received", "kc.evaluator.points", "cps")
    yield _graph(MISSING_ID, 6, "Senders not judged", "kc.evaluator.missing", "short", "max")
    yield _graph(47, 6, "Silent recorders", "kc.evaluator.silent", "short", "max")
    yield _graph(21, 6, "OTLP requests", "kc.evaluator.requests", "reqps")
    kept, allowed = "kc.evaluator.series", "kc.evaluator.series.limit"
    about = f"{METRICS[kept].meaning} The dashed line: {METRICS[allowed].meaning.lower()} {_EVALUATOR}"
    series = (target(queries.health(kept), "streams"), target(queries.health(allowed), "limit"))
    yield panels.with_limit(panels.graph(22, "Streams", about, series, "short"), "/^limit$/")
    yield _graph(23, 8, "Duration of an evaluation", "kc.evaluator.tick.duration", "s", "max")
    yield _graph(35, 8, "Failures to judge", "kc.evaluator.failures", "cps")
    free = "Empty without a state file. "
    yield _graph(37, 12, "Not in the snapshot yet", "kc.evaluator.inbox.size", "bytes", note=free)
    yield _graph(41, 12, "Requests in flight", "kc.evaluator.in_flight", "bytes")
    yield _graph(42, 12, "Left on the disk", "kc.evaluator.disk.free", "bytes", "min", note=free)
    yield _graph(43, 12, "The disk takes for the state", "kc.evaluator.sync.duration", "s", "max", note=free)
    shards = "Empty where streams are in the evaluator's process. "
    yield _graph(38, 12, "Shards: bytes behind", "kc.evaluator.shard.lag", "bytes", "max", note=shards)
    yield _graph(39, 12, "Shards: streams", "kc.evaluator.shard.streams", "short", "max", note=shards)


def _webhooks() -> Iterator[Any]:
    yield _graph(24, 8, "Webhooks waiting, by endpoint", "kc.outbox.pending", "suffix: message")
    name, of = "kc.outbox.disabled", ("kc.endpoint",)
    disabled = target(f"time() - {queries.health(name, of, 'max')}", legend(*of))
    yield panels.graph(48, "Endpoints disabled for", f"{METRICS[name].meaning} {_EVALUATOR}", (disabled,), "s")
    yield _graph(25, 8, "Webhook deliveries", "kc.outbox.attempts", "cps")


def _recorders() -> Iterator[Any]:
    of, tokens = ("kc.contract",), "suffix: tokens/s"
    yield _graph(26, 8, "Tokens measured", "kc.recorder.tokens", tokens)
    matchers = ", ".join((*queries.picked(of), f'{label("kc.slice")}="{OTHER}"'))
    over = f"rate({prometheus_name(QUANTITIES['tv_token'])}{{{matchers}}}[$__rate_interval])"
    about = (
        "Tokens per second on slices over the contract's cap: they are counted together as `other`, and no clause is "
        f"judged on it. Anything here means that the cap hides what you asked to see. {_RECORDERS}"
    )
    shown = (target(f"histogram_count({queries.by(of, over, 'sum')})", legend(*of), step=STEP),)
    yield panels.graph(31, "Tokens counted as `other`", about, shown, tokens)
    yield _graph(29, 8, "Share of batches measured", "kc.recorder.sampling", "percentunit", "min")
    why = ("kc.contract", "kc.reason")
    yield _graph(INVALID_INPUT_ID, 12, "Invalid sequences, by reason", "kc.input.invalid", "cps", of=why)
    yield _graph(45, 12, "Prompts that counted", "kc.recorder.prompts", "cps")
    yield _graph(27, 12, "Batches dropped, by reason", "kc.recorder.dropped", "cps")
    yield _graph(28, 12, "Exports refused, per second", "kc.recorder.export.failures", "cps")
    yield _graph(33, 12, "Requests captured in engines", "kc.capture.recorded", "reqps")
    yield _graph(34, 12, "Requests not captured, by reason", "kc.capture.dropped", "reqps")
    titles = {"kc.contract": "Contract", "kc.kernel.role": "Role", "kc.kernel.version": "Version"}
    yield panels.table(
        30,
        "Kernel versions",
        f"{METRICS['kc.kernel.info'].meaning} Other panels show the short fingerprint only. {_RECORDERS}",
        {"Info": f"{selector('kc.kernel.info', None, *queries.picked(of))} == 1"},
        {label(name): title for name, title in titles.items()},
        {},
        hide=("Value", "__name__", "job", "instance"),
        height=8,
    )


def _graph(
    id: int, span: int, title: str, name: str, unit: str, how: str = "sum", *, of: Sequence[str] = (), note: str = ""
) -> Any:
    """A metric by its attributes: a counter as a rate, any other as it is."""
    metric = METRICS[name]
    of, recorders = of or metric.attributes, not name.startswith(("kc.evaluator.", "kc.outbox."))
    if metric.instrument is Instrument.COUNTER:
        shown, note = target(queries.rate(name, of), legend(*of), step=STEP if recorders else ""), "Per second. "
    else:
        shown = target(queries.health(name, of, how), legend(*of) or title.lower())
    about = f"{metric.meaning} {note}{_RECORDERS if recorders else _EVALUATOR}"
    return panels.graph(id, title, about, (shown,), unit, span=span)


def _outcome(pattern: str, *, no: bool = False) -> str:
    return f'{label("kc.outcome")}{"!~" if no else "=~"}"{pattern}"'
