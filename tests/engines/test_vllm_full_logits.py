"""Whole distributions of a real vLLM beside those of the checkpoint: clauses on full logits have a way there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.handbook.snippets import HANDBOOK, ROOT, snippets
from tests.tools.contracts import contract_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_whole_distributions(tiny_model, tmp_path):
    """The handbook's program as it is: rounding is within the limit of every clause on full logits."""
    (block,) = (
        snippet
        for snippet in snippets(HANDBOOK / "reference" / "recorder.md")
        if snippet.run_by.endswith("::test_whole_distributions")
    )
    (tmp_path / "logits.py").write_text(block.text.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model)))
    clauses = [{"id": "exact-tv", "metric": "tv_exact", "unit": "token", "limit": 0.01}]
    (tmp_path / "policy.yaml").write_text(contract_text(numerical=clauses))
    done = subprocess.run(
        [sys.executable, "logits.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=1500,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OTEL_METRICS_EXPORTER": "none", "VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    measured, tv = done.stdout.split()[-2:]
    assert int(measured) == 16 * 32
    assert 0.0 < float(tv) < 0.01
