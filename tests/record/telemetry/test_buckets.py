"""Which bucket a number falls into: the same one as the OpenTelemetry SDK puts it in."""

import numpy as np
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import LogarithmMapping

from kc_otel.contract.bucket_layouts import ZERO_THRESHOLD
from kc_otel.record.measure.sampled import TOKEN
from kc_otel.record.telemetry.buckets import Partition, Slots, cells, slots

SCALE = 4


def sdk_slot(value: float) -> int:
    of = slots()
    if abs(value) <= ZERO_THRESHOLD:
        return of.center
    outward = LogarithmMapping(SCALE).map_to_index(abs(value)) - of.lowest_index + 1
    return of.center + outward if value > 0 else of.center - outward


def with_table(partition: Partition) -> Partition:
    partition._located = 1 << 30
    return partition


def neighbours(values):
    values = np.asarray(values, dtype=np.float32)
    return np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))])


def test_every_boundary_is_where_the_sdk_has_it() -> None:
    of = Slots()
    values = neighbours(of.bounds)
    values = np.concatenate([values, -values])
    expected = [sdk_slot(float(value)) for value in values]
    assert of.locate(values).tolist() == expected
    with_table(of.partition)
    assert of.locate(values).tolist() == expected


def test_random_numbers_are_where_the_sdk_has_them() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 10_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected, of = [sdk_slot(float(value)) for value in values], Slots()
    assert of.locate(values).tolist() == expected
    assert with_table(of.partition).locate(values).tolist() == expected


def test_what_is_close_to_zero_is_zero() -> None:
    tiny = np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-20, -1e-20, ZERO_THRESHOLD, -ZERO_THRESHOLD])
    of = Slots()
    assert set(of.locate(tiny).tolist()) == {of.center}
    with_table(of.partition)
    assert set(of.locate(tiny).tolist()) == {of.center}
    beyond = np.nextafter(np.float32(ZERO_THRESHOLD), np.float32(1))
    assert of.locate(np.array([beyond, -beyond])).tolist() == [of.center + 1, of.center - 1]


def test_what_is_too_large_is_in_the_outermost_bucket() -> None:
    of = Slots()
    values = np.array([1e300, -1e300, np.inf, -np.inf])
    assert of.locate(values).tolist() == [of.size - 1, 0, of.size - 1, 0]


def test_cells_change_exactly_where_a_quantity_changes_bucket() -> None:
    """At the two float32 numbers around every cut, both cells' buckets are those of the quantities in float64."""
    of = cells()
    inner = of.partition.edges
    outer = np.nextafter(inner, np.float32(-np.inf))
    for values in (inner, outer):
        located = of.partition.locate(values)
        for key, quantity in TOKEN.items():
            expected = of.slots.of_exact(quantity(values.astype(np.float64)))
            assert of._slot[key][located].tolist() == expected.tolist()
