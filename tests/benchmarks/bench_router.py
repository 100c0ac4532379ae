"""What `Router.choose` costs on the path of a request: `python tests/benchmarks/bench_router.py`.

Aim: under 2 us in the median with a route or a canary in force, whether the request is given by attributes or by names
of slices. The time is that of the thread on its core, so that neighbours on a shared machine do not count; the median
and the best of 21 runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time
from timeit import repeat

from kc_otel.client.router import Router
from kc_otel.judge.decisions import Canary, DecisionTable, Route, changed
from tests.tools.contracts import contract_of

CALLS = 50_000
CONTRACT = contract_of(
    "policy-7b",
    slices={f"task-{n}": {"where": {"task": f"t{n}", "prompt_tokens": ">= 1024"}} for n in range(20)},
    statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}],
)


def table(slices: int) -> DecisionTable:
    about = ("inferB", "trainA", "train-kernel", "token-tv", "broken", 0.0)
    return DecisionTable(version=1, routes=tuple(Route("policy-7b", f"task-{n}", *about) for n in range(slices)))


def show(what: str, by: str, covered: bool, call: Callable[[], object]) -> None:
    times = [seconds / CALLS * 1e6 for seconds in repeat(call, number=CALLS, repeat=21, timer=thread_time)]
    print(f"{what:>18} {by:>12} {covered!s:>8} {median(times):>7.2f} {min(times):>7.2f}")


def main() -> None:
    hit, miss = {"task": "t0", "prompt_tokens": 4096}, {"task": "prose", "prompt_tokens": 10}
    asked = (
        ("attributes", True, hit),
        ("attributes", False, miss),
        ("names", True, ("all", "task-0")),
        ("names", False, ("all", "task-19")),
    )
    print(f"{'in force':>18} {'by':>12} {'covered':>8} {'median':>7} {'best':>7}  us")
    for routes in (0, 1, 3):
        router = Router.from_table(table(routes), contracts=[CONTRACT], stale_after=60.0)
        for by, covered, where in asked:
            show(f"{routes} routes", by, covered, partial(router.choose, "policy-7b", where, "inferB"))
    canary = Canary("policy-7b", "inferB", 0.05, "canary, step 2 of 3", 0.0)
    router = Router.from_table(changed(table(0), 1.0, canaries=[canary]), contracts=[CONTRACT], stale_after=60.0)
    for by, _, where in asked:
        show("a canary", by, True, partial(router.choose, "policy-7b", where, "inferB", key="user-17"))


if __name__ == "__main__":
    main()
