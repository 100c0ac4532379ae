"""Names in Prometheus of what the registry calls by OpenTelemetry names."""

import re

from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.contract.registry.own_metrics import ATTRIBUTES, METRICS, label, metric, prometheus_name


def test_metrics_get_the_name_that_prometheus_users_expect() -> None:
    """The unit comes before `_total`; units that have no suffix here have none in OpenTelemetry's translation."""
    assert metric("kc.bound.estimate") == "kc_bound_estimate"
    assert metric("kc.evaluator.points") == "kc_evaluator_points_total"
    assert metric("kc.evaluator.tick.duration") == "kc_evaluator_tick_duration_seconds"
    units = {entry.unit for entry in (*METRICS.values(), *RECORDED.values())}
    assert {unit for unit in units if not unit.startswith("{")} == {"1", "s", "By"}


def test_every_name_of_the_registry_is_valid_and_unique_in_prometheus() -> None:
    names = [prometheus_name(entry) for entry in (*METRICS.values(), *RECORDED.values())]
    labels = [label(name) for name in ATTRIBUTES]
    assert len(set(names)) == len(names)
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", name) for name in (*names, *labels))
