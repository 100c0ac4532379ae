"""Four operators side by side, recorded and judged by an evaluator of its own.

    python -m examples.operators

Needs torch alone and takes about half a minute on a CPU. What is compared is in comparisons.py.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from examples.demo.__main__ import export_to
from examples.demo.evaluator import Evaluator, evaluating
from examples.demo.terminal import Terminal
from examples.operators.comparisons import comparisons
from kc_otel import Kernel, Recorder
from kc_otel.client.webhooks import new_secret
from kc_otel.integrations.operators import compare_callables

CONTRACT = Path(__file__).with_name("contract.yaml")


def settled(evaluator: Evaluator, recorder: Recorder, rows: dict[str, int]) -> list[dict]:
    """The verdicts once the rows of every clause have been judged."""
    recorder.force_flush()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        cells = evaluator.verdicts()
        judged = {v["clause"]: v["samples"] for v in cells if v["slice"] == "all"}
        if all(judged.get(clause, 0) >= count for clause, count in rows.items()):
            break
        time.sleep(0.2)
    return cells


def main() -> None:
    """Compare, record, print."""
    terminal = Terminal()
    torch.set_num_threads(1)
    kernel = Kernel("torch", version=torch.__version__, dtype="int8")
    with (
        tempfile.TemporaryDirectory(prefix="kc-otel-operators-") as folder,
        evaluating(CONTRACT, Path(folder), "http://127.0.0.1:9/", new_secret()) as evaluator,
    ):
        export_to(evaluator.otlp)
        with Recorder(CONTRACT, inference=kernel) as recorder:
            rows = {clause.id: 0 for clause in recorder.contract.clauses}
            for comparison in comparisons():
                for report in compare_callables(comparison, recorder):
                    numbers = report.summary()
                    terminal.say(
                        f"{comparison.operator} {report.case}: {numbers['rows']:.0f} rows, relative p99.9 "
                        f"{numbers['relative_p99.9']:.2g}, at most {numbers['ulp_max']:.3g} ulp"
                    )
                    for clause in recorder.contract.clauses:
                        if clause.operator == comparison.operator:
                            rows[clause.id] += report.values()[clause.metric].size
            cells = settled(evaluator, recorder, rows)
        terminal.verdicts([v for v in cells if v["status"] != "NO_DATA"], {kernel.fingerprint: "int8"})


if __name__ == "__main__":
    main()
