"""Statistics of locating: what is above noise, and shares of a drift."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.diagnose.above_noise import (
    LEAST_FLOOR,
    Measured,
    boundary_drift,
    enough_sequences,
    least_sequences,
    sequences_to_name,
    shares_of,
)
from kc_otel.diagnose.boundaries import Boundary
from kc_otel.diagnose.located import Divergence, Located, by_size, located_lines, located_sentence


def measured(local, noise=1e-3):
    local = np.asarray(local, dtype=np.float64)
    none = np.full(local.size, np.nan)
    return Measured(local, 3 * local, none, np.full(local.size, noise), none, none, none)


def test_only_what_is_above_its_floor_is_named():
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
    outlier = np.full(12, 1e-4)
    outlier[0] = 1.0
    assert not boundary_drift({Boundary(0, "head"): measured(outlier)}, 0.01)[0].is_above
    outlier[:6] = 1.0
    assert boundary_drift({Boundary(0, "head"): measured(outlier)}, 0.01)[0].is_above


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", [1, 30])
def test_false_names_are_as_rare_as_was_promised(boundaries):
    rng = np.random.default_rng(0)
    named = 0
    for _ in range(100):
        beyond = rng.random((boundaries, 12)) < 0.1
        family = {Boundary(i, "o_proj"): measured(np.where(row, 1.0, 0.0)) for i, row in enumerate(beyond)}
        named += any(row.is_above for row in boundary_drift(family, 0.01))
    assert named <= 4  # P(Bin(100, 0.01) > 4) = 0.003


def test_so_many_sequences_are_needed_and_are_enough():
    least = least_sequences(50, 0.01)
    for count, expected in ((least, True), (least - 1, False)):
        family = {Boundary(i, "o_proj"): measured(np.full(count, 1.0 if not i else 0.0)) for i in range(50)}
        assert boundary_drift(family, 0.01)[0].is_above is expected


def located(rows, *findings):
    """What is said of these boundaries."""
    many = max(row.above.samples for row in rows)
    return Located(
        contract="c", slice="all", metric="tv_token", sequences=int(many), tokens=99, boundaries=tuple(rows),
        findings=findings, culprit=by_size(findings, rows), shares=None, observed=float("nan"), notes=(),
        confidence=0.99, settings=("the contract's kernels differ: x",),
    )  # fmt: skip


@pytest.mark.slow
def test_what_too_few_sequences_show_is_undecided_and_says_how_many_are_needed():
    """Four that all differ by 13,000 floors prove nothing at 360 boundaries; twelve that do not are no culprit."""

    def seen(count, error, boundaries=360):
        family = {Boundary(i, "kv_cache"): measured(np.full(count, 0.0 if i else error)) for i in range(boundaries)}
        return located(boundary_drift(family, 0.005))

    few = seen(4, 13.0)
    assert few.undecided == (
        "layer 0, kv_cache differs by 1.3e+04 times its floor, and 100 % of 4 sequences are beyond twice the floor, "
        "which proves nothing at 360 boundaries; give 5 sequences or more"
    )
    assert next(line for line in located_lines(few) if line.startswith("undecided"))
    assert located_sentence(few).startswith("undecided which operator it is: layer 0")
    assert seen(4, 0.0).undecided == "4 sequences cannot name anything at 360 boundaries; give 5 or more"
    assert seen(12, 0.0).undecided == ""
    assert "no culprit: no boundary is above noise" in list(located_lines(seen(12, 0.0)))
    assert sequences_to_name(0.5, 720, 0.01) > 12 > sequences_to_name(1.0, 720, 0.01)
    assert list(located_lines(few))[1] == "look first: the contract's kernels differ: x"


def test_sequences_are_counted_before_the_work():
    enough_sequences(5, 360, 0.01)
    with pytest.raises(ValueError, match=r"4 are too few to name any of 360 boundaries.*give 5 or more"):
        enough_sequences(4, 360, 0.01)


def test_rounding_is_no_fault_where_both_kernels_compute_alike():
    family = {Boundary(0, "rotary"): measured(np.full(12, 2e-3), noise=0.0)}
    assert boundary_drift(family, 0.01)[0].floor == LEAST_FLOOR
    assert boundary_drift(family, 0.01)[0].is_above
    assert not boundary_drift(family, 0.01, rounding=1.6e-3)[0].is_above


def test_without_shares_the_largest_error_is_the_culprit():
    family = {Boundary(0, "rotary"): measured(np.full(12, 4e-3)), Boundary(0, "kv_cache"): measured(np.full(12, 3e-2))}
    rows = boundary_drift(family, 0.01)
    found = [Divergence("drift", row.boundary, "", "") for row in rows]
    assert located(rows, *found).culprit == found[1]
    tokens = Divergence("tokens", Boundary(None, "tokens"), "", "")
    assert located(rows, tokens, *found).culprit == tokens
    assert located(rows).culprit is None


def test_shares_add_up():
    def value(put_in):
        return np.array([1.0, 2.0, 3.0]) * ((0 in put_in) + (1 in put_in) + ({0, 1} <= put_in))

    found = shares_of(["a", "b", "idle"], value, alpha=0.05)
    shares = {part.name: part.share.estimate for part in found.components}
    assert shares == pytest.approx({"a": 0.5, "b": 0.5, "idle": 0.0})


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "alpha", "least"), [(8, 0.01, 0.94), (16, 0.01, 0.955), (40, 0.1, 0.86)])
def test_an_interval_holds_the_share_of_the_population(sequences, alpha, least):
    """Of heavy-tailed parts with few sequences too; never so wide that it says nothing."""
    rng = np.random.default_rng(0)
    held, widths = [], []
    for seed in range(400):
        parts = np.exp(rng.normal(0.0, 0.8, (sequences, 2))) * (3.0, 1.0)
        found = shares_of(["a", "b"], lambda put_in, p=parts: p[:, sorted(put_in)].sum(1), alpha=alpha, seed=seed)
        share = next(part.share for part in found.components if part.name == "a")
        held.append(share.lower <= 0.75 <= share.upper)
        widths.append(share.upper - share.lower)
    assert least < np.mean(held)
    assert np.mean(widths) < 0.45


@pytest.mark.slow
@pytest.mark.parametrize("saturating", [lambda x: np.minimum(x, 9.0), lambda x: 1.0 - np.exp(-x / 6.0), np.sqrt])
def test_drawing_orders_is_part_of_the_interval(saturating):
    rng = np.random.default_rng(1)
    sizes = np.array([8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])

    def value_of(scale):
        return lambda put_in: scale * saturating(sum(sizes[index] for index in put_in))

    everything = range(len(sizes))
    orders = [rng.permutation(len(sizes)) for _ in range(20_000)]
    truth = np.zeros(len(sizes))
    for order in orders:
        truth[order] += np.diff(saturating(np.cumsum(sizes[order])), prepend=0.0) / len(orders)
    truth /= truth.sum()
    held = []
    for seed in range(100):
        scale = np.exp(rng.normal(0.0, 0.5, 16))
        found = shares_of([str(index) for index in everything], value_of(scale), alpha=0.1, seed=seed)
        held += [part.share.lower <= truth[int(part.name)] <= part.share.upper for part in found.components]
    assert np.mean(held) > 0.85


def test_shares_of_few_components_are_exact():
    value = {frozenset(): 0.0, frozenset({0}): 1.0, frozenset({1}): 0.0, frozenset({2}): 0.0}
    value |= {frozenset({0, 1}): 4.0, frozenset({0, 2}): 1.0, frozenset({1, 2}): 0.0, frozenset({0, 1, 2}): 6.0}
    runs = []
    found = shares_of(["a", "b", "c"], lambda put_in: runs.append(put_in) or np.full(4, value[put_in]), alpha=0.05)
    assert len(runs) == 8
    shares = {part.name: 6.0 * part.share.estimate for part in found.components}
    assert shares == pytest.approx({"a": 19 / 6, "b": 13 / 6, "c": 4 / 6})


def test_nothing_to_divide_has_no_shares():
    found = shares_of(["a"], lambda _: np.zeros(3), alpha=0.05)
    assert found.components[0].share.estimate == 0.0
