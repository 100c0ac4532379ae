"""What an evaluation costs: `python tests/benchmarks/bench_evaluate.py`, a minute.

So many processes export what real recorders do with the contract of twenty slices after 100,000 tokens (see
`tests.tools.real_messages`), every ten seconds, and the evaluator judges after each round: where a pane turns, within
one, and where nothing is new. Times are CPU time of this process, in milliseconds, the median of the rounds; verdicts
are made when they are asked for, as a page and a save do. Memory is that of this process.
"""

from __future__ import annotations

import os

# NumPy reads this when it is loaded, and `kc-otel` says it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sqlite3
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from _timing import resident
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.evaluator import Evaluator
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.state_file import unit_of_work
from tests.tools.real_messages import INTERVAL, Case, Sender, contract, messages
from tests.tools.verdicts import streams_of

PROCESSES, ROUNDS, WARM = 64, 14, 2


def main() -> None:
    bodies = messages(Case("twenty-slices", 100_000), exports=ROUNDS)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    judged = contract("twenty-slices")
    evaluator, store = Evaluator([judged]), EvaluatorStore(connection)
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(what: str, call: Callable[[], object]) -> None:
        began = time.process_time()
        call()
        spent[what].append(1e3 * (time.process_time() - began))

    now, before, pane = time.time(), resident(), -1
    width = next(iter(evaluator.states.values())).grids[0].width
    senders = [Sender(bodies, number, now) for number in range(PROCESSES)]
    for number in range(ROUNDS):
        exported = [sender.export() for sender in senders]
        for body in exported:
            columns = evaluator.columns_of(body, 10**6)
            evaluator.ingest_metrics(ExportMetricsServiceRequest.FromString(body) if columns is None else columns, now)
        turned, pane = now // width != pane, now // width
        kind = "a pane turns" if turned else "every cell has news"
        timed(kind, lambda: evaluator.evaluate(now))  # noqa: B023
        timed("verdicts of all cells", lambda: next(iter(evaluator.evaluate(now).values())).verdicts)  # noqa: B023
        with unit_of_work(connection) as unit:
            timed("saving what changed", lambda: store.save(evaluator, unit))
        timed("nothing is new", lambda: evaluator.evaluate(now + 1.0))  # noqa: B023
        if number < WARM:
            spent.clear()
        now += INTERVAL
    [evaluation] = evaluator.evaluate(now).values()
    print(
        f"{PROCESSES} processes, {len(streams_of(evaluator)):,} streams, "
        f"{len(evaluation.verdicts)} cells; {before / 2**20:.0f} MiB before the first message, "
        f"{resident() / 2**20:.0f} after"
    )
    for what, times in spent.items():
        print(f"  {what:24s} {statistics.median(times):7.1f} ms")


if __name__ == "__main__":
    main()
