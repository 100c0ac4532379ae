"""Runs the examples in docstrings."""

import doctest
import importlib
from typing import Any

__all__ = ["run_examples"]


class _WhereShown(doctest.OutputChecker):
    """Compares what is shown; a line of which nothing is shown may print, as trainers and engines do."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def run_examples(module: str, **names: Any) -> None:
    """Run every `>>>` of a module and compare what it prints; each docstring starts with the module's names.

    `names` are what the examples use beside them: their reader's model, data and trainer, which may print.
    """
    checker = _WhereShown() if names else doctest.OutputChecker()
    groups = [found for found in doctest.DocTestFinder().find(importlib.import_module(module)) if found.examples]
    assert groups, "`>>>` stands where doctest finds no docstring"
    for group in groups:
        group.globs.update(names)
        said: list[str] = []
        runner = doctest.DocTestRunner(checker, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        ran = runner.run(group, out=said.append)
        assert not ran.failed, "".join(said)
        assert not any(example.options.get(doctest.SKIP) for example in group.examples), f"{group.name} skips a line"
