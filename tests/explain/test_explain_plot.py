"""The picture of bounds over horizons."""

import builtins
from pathlib import Path

import numpy as np
import pytest

from kc_otel.contract import load
from kc_otel.explain import explain
from kc_otel.explain.horizon_plot import curves, draw, horizons

_CONTRACT = Path(__file__).parent / "golden" / "contract.yaml"


def test_curves_are_the_bounds_at_each_horizon():
    """Slope 1 for T x mean, 1/2 for KL, 0 for what is measured; none above 1."""
    contract = load(_CONTRACT)
    at = np.array([1, 4, 16], dtype=np.int64)
    found = {curve.family: curve for curve in curves(contract, "all", at)}
    assert set(found) == {"worst case", "log ratios", "on policy", "KL", "measured"}
    assert found["on policy"].clause == "token-tv"
    assert found["on policy"].tv == pytest.approx(0.0004 * at)
    assert found["KL"].clause == "token-kl"
    assert found["KL"].tv == pytest.approx(np.sqrt(0.0000032 * at / 2))
    assert found["measured"].tv == pytest.approx(0.02)
    assert all((curve.tv <= 1).all() for curve in curves(contract, "all", horizons(10_000)))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_is_written_and_the_same_each_time(tmp_path, suffix):
    """In each format, byte for byte."""
    contract = load(_CONTRACT)
    explanation = explain(contract)
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    draw(contract, explanation, first)
    draw(contract, explanation, second)
    assert first.stat().st_size > 5000
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_the_svg_names_every_curve_and_marks_horizon_and_budget(tmp_path):
    """One panel for the reward, one for the gradient."""
    import matplotlib as mpl

    contract = load(_CONTRACT)
    path = tmp_path / "a.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(contract, explain(contract), path)
    drawn = path.read_text(encoding="utf-8")
    for said in ("on policy: token-tv", "KL + Pinsker: token-kl", "measured: ", "T = 512", "budget 0.02"):
        assert said in drawn
    assert drawn.count("worst case: logit-worst") == 2


@pytest.mark.slow
def test_a_name_that_is_no_picture_is_refused(tmp_path):
    """With the endings that are."""
    contract = load(_CONTRACT)
    with pytest.raises(ValueError, match=r"end the name in \.pdf, \.png, \.svg"):
        draw(contract, explain(contract), tmp_path / "a.txt")


def test_nothing_to_draw_is_said(contract, tmp_path):
    """Where no clause bounds sequences."""
    made = contract("runtime: [{id: lag, metric: weights_lag, limit: 1}]")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(made, explain(made), tmp_path / "a.png")


@pytest.mark.slow
def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    """And how to install it."""
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name, name=name)
        return real(name, *args, **kwargs)

    contract = load(_CONTRACT)
    explanation = explain(contract)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kc-otel\[plots\]'"):
        draw(contract, explanation, tmp_path / "a.png")
