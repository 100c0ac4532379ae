"""Every example in the package's docstrings runs and gives what it says, here or where its engine is."""

from __future__ import annotations

from pathlib import Path

import pytest

import kc_otel
from tests.tools.docstrings import run_examples

PACKAGE = Path(kc_otel.__file__).parent
ENGINES = Path(__file__).parent / "engines"
WITH_AN_ENGINE = {
    "kc_otel.integrations.transformers": "test_hf_callbacks.py",
    "kc_otel.integrations.trl.instrumented_trainer": "test_trl_grpo.py",
    "kc_otel.integrations.vllm.instrumentor": "test_vllm_offline.py",
}
"""Modules whose examples need an engine or a trainer, and which of the engines' tests runs them."""


def name_of(path: Path) -> str:
    """Dotted name of the module in a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WITH_EXAMPLES = sorted(name_of(path) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name in WITH_EXAMPLES if name not in WITH_AN_ENGINE])
def test_examples_give_what_they_say(name, monkeypatch):
    monkeypatch.chdir(PACKAGE.parent)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    run_examples(name)


@pytest.mark.parametrize("name", WITH_AN_ENGINE)
def test_examples_that_need_an_engine_run_where_it_is(name):
    assert name in WITH_EXAMPLES
    assert f'run_examples("{name}"' in (ENGINES / WITH_AN_ENGINE[name]).read_text(encoding="utf-8")
