"""What `Router.choose` costs on the path of a request: `python tests/benchmarks/bench_router.py`.

Aim: under 2 us with a route in force, whether the request is given by attributes or by names of slices. The time is
that of the thread on its core, so that neighbours on a shared machine do not count.
"""

from __future__ import annotations

from functools import partial
from time import thread_time
from timeit import repeat

from kc_otel.contract.model import Contract
from kc_otel.routing.client import Router
from kc_otel.routing.table import DecisionTable, Route

CONTRACT = Contract.model_validate(
    {
        "apiVersion": "kernel-contract/v1",
        "kind": "KernelContract",
        "metadata": {"name": "policy-7b", "version": 1, "owner": "rl-infra"},
        "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
        "slices": {f"task-{n}": {"where": {"task": f"t{n}", "prompt_tokens": ">= 1024"}} for n in range(20)},
        "statistical": [{"id": "token-tv", "metric": "tv_token", "limit": 0.004}],
    }
)


def table(slices: int) -> DecisionTable:
    return DecisionTable(
        version=1,
        routes=tuple(
            Route("policy-7b", f"task-{n}", "inferB", "trainA", "train-kernel", "token-tv", "broken", 0.0)
            for n in range(slices)
        ),
    )


def microseconds(router: Router, where: object) -> float:
    number = 100_000
    call = partial(router.choose, "policy-7b", where, "inferB")
    return min(repeat(call, number=number, repeat=7, timer=thread_time)) / number * 1e6


def main() -> None:
    hit, miss = {"task": "t0", "prompt_tokens": 4096}, {"task": "prose", "prompt_tokens": 10}
    print(f"{'routes':>6} {'by':>12} {'covered':>8} {'us':>6}")
    for routes in (0, 1, 3):
        router = Router.from_table(table(routes), contracts=[CONTRACT], stale_after=60.0)
        for by, covered, where in (
            ("attributes", True, hit),
            ("attributes", False, miss),
            ("names", True, ("all", "task-0")),
            ("names", False, ("all", "task-19")),
        ):
            print(f"{routes:>6} {by:>12} {covered!s:>8} {microseconds(router, where):>6.2f}")


if __name__ == "__main__":
    main()
