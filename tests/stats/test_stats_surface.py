"""The public surface of kc_otel.stats: every name is there, and nobody pays for what is not used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kc_otel.stats


def loaded_by(statement):
    """Modules that a statement loads in a fresh interpreter."""
    code = f"{statement}; import sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("name", kc_otel.stats.__all__)
def test_every_public_statistic_is_there(name):
    """Each name can be imported from the package, is listed, and is no module that happens to be called the same."""
    assert getattr(kc_otel.stats, name).__module__.startswith("kc_otel.stats.")
    assert name in dir(kc_otel.stats)


def test_a_misspelt_statistic_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"kc_otel\.stats.*mean_intervall"):
        _ = kc_otel.stats.mean_intervall


def test_a_recorder_pays_for_histograms_only():
    """What fills histograms loads NumPy, and neither SciPy nor any interval."""
    loaded = loaded_by("from kc_otel.stats import Histogram")
    assert "numpy" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in {"scipy", "pydantic", "opentelemetry"}}
    ours = {name for name in loaded if name.startswith("kc_otel.stats.")}
    assert ours == {"kc_otel.stats.histogram", "kc_otel.stats.interval"}
