"""Every example in the package's docstrings runs and gives what it says, or is named here with what it lacks."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import kc_otel

PACKAGE = Path(kc_otel.__file__).parent
NEEDS = {
    "kc_otel.integrations.operators.modules": "two models in torch",
    "kc_otel.integrations.transformers": "a Trainer with a model to train",
    "kc_otel.integrations.trl.attach": "a GRPOTrainer with a model to train",
    "kc_otel.integrations.vllm.instrumentor": "vLLM and a model",
}
"""Modules whose examples are marked `+SKIP`, and what it would take to run them."""


def name_of(path: Path) -> str:
    """Dotted name of the module in a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WITH_EXAMPLES = sorted(name_of(path) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


def examples_of(name: str) -> list[doctest.DocTest]:
    """The examples in a module's docstrings, one group for each docstring that has any."""
    return [found for found in doctest.DocTestFinder().find(importlib.import_module(name)) if found.examples]


@pytest.mark.parametrize("name", [name for name in WITH_EXAMPLES if name not in NEEDS])
def test_examples_give_what_they_say(name, monkeypatch):
    """From the root of the repository, with nothing installed but the package and the tests' tools."""
    monkeypatch.chdir(PACKAGE.parent)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    groups = examples_of(name)
    assert groups, "`>>>` stands where doctest finds no docstring"
    for group in groups:
        said: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        ran = runner.run(group, out=said.append)
        assert not ran.failed, "".join(said)
        assert not any(example.options.get(doctest.SKIP) for example in group.examples), f"{group.name} skips a line"


@pytest.mark.parametrize("name", NEEDS)
def test_examples_that_do_not_run_are_marked_to_the_last_line(name):
    """What needs an engine says so on each line, so that nobody's doctest run tries half of it."""
    assert name in WITH_EXAMPLES
    marks = {
        line
        for line in Path(importlib.util.find_spec(name).origin).read_text().splitlines()
        if ">>> " in line and "# doctest: +SKIP" not in line
    }
    assert not marks
