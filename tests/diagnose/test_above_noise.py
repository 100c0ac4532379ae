"""Boundaries are named where sequences surely differ by more than noise, and hardly ever elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.diagnose.above_noise import Measured, boundary_drift, least_sequences
from kc_otel.diagnose.boundaries import Boundary


def measured(local, noise=1e-3):
    local = np.asarray(local, dtype=np.float64)
    none = np.full(local.size, np.nan)
    return Measured(local, 3 * local, none, np.full(local.size, noise), none, none, none)


def test_only_what_is_above_its_floor_is_named():
    """A boundary that differs by as much as the kernel from itself is not."""
    rows = boundary_drift(
        {
            Boundary(0, "o_proj"): measured(np.full(12, 1.5e-3)),
            Boundary(1, "o_proj"): measured(np.full(12, 4e-3)),
            Boundary(2, "o_proj"): measured(np.full(12, 4e-3), noise=4e-3),
        },
        0.01,
    )
    assert [row.is_above for row in rows] == [False, True, False]
    assert rows[1].local.estimate == 4e-3
    assert rows[1].above.lower > 0.1


def test_one_sequence_of_many_is_no_proof():
    """A single outlier is what a tenth of sequences may be; half of them are not."""
    outlier = np.full(12, 1e-4)
    outlier[0] = 1.0
    assert not boundary_drift({Boundary(0, "head"): measured(outlier)}, 0.01)[0].is_above
    outlier[:6] = 1.0
    assert boundary_drift({Boundary(0, "head"): measured(outlier)}, 0.01)[0].is_above


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", [1, 30])
def test_false_names_are_as_rare_as_was_promised(boundaries):
    """With a tenth of the sequences beyond the floor everywhere, one family in a hundred names anything."""
    rng = np.random.default_rng(0)
    named = 0
    for _ in range(100):
        beyond = rng.random((boundaries, 12)) < 0.1
        family = {Boundary(i, "o_proj"): measured(np.where(row, 1.0, 0.0)) for i, row in enumerate(beyond)}
        named += any(row.is_above for row in boundary_drift(family, 0.01))
    assert named <= 4  # P(Bin(100, 0.01) > 4) = 0.003


def test_so_many_sequences_are_needed_and_are_enough():
    """The least number names a boundary that all of them are beyond, one fewer does not."""
    least = least_sequences(50, 0.01)
    for count, expected in ((least, True), (least - 1, False)):
        family = {Boundary(i, "o_proj"): measured(np.full(count, 1.0 if not i else 0.0)) for i in range(50)}
        assert boundary_drift(family, 0.01)[0].is_above is expected
