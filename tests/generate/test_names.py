"""Names in Prometheus of what the registry calls by OpenTelemetry names."""

import re

from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.contract.registry.own_metrics import (
    ATTRIBUTES,
    METRICS,
    Instrument,
    Metric,
    label,
    metric,
    prometheus_name,
    selector,
)


def test_metrics_get_the_name_that_prometheus_users_expect() -> None:
    """The unit comes before `_total`, and is not doubled where the name has it already."""
    assert metric("kc.bound.estimate") == "kc_bound_estimate"
    assert metric("kc.evaluator.points") == "kc_evaluator_points_total"
    assert metric("kc.evaluator.tick.duration") == "kc_evaluator_tick_duration_seconds"
    assert prometheus_name(Metric("kc.time", "s", Instrument.COUNTER, (), "")) == "kc_time_seconds_total"
    assert prometheus_name(Metric("kc.time.seconds", "s", Instrument.GAUGE, (), "")) == "kc_time_seconds"


def test_every_name_of_the_registry_is_valid_and_unique_in_prometheus() -> None:
    names = [prometheus_name(entry) for entry in (*METRICS.values(), *RECORDED.values())]
    labels = [label(name) for name in ATTRIBUTES]
    assert len(set(names)) == len(names)
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", name) for name in (*names, *labels))


def test_a_selector_puts_equalities_before_other_matchers() -> None:
    assert selector("kc.verdict") == "kc_verdict{}"
    written = selector("kc.verdict", {"kc.kernel.train": "ab"}, 'kc_slice=~"$slice"')
    assert written == 'kc_verdict{kc_kernel_train="ab", kc_slice=~"$slice"}'
