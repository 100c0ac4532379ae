"""Ten faults planted at every depth of a small model: found, missed or wrong, with time and tokens.

python -m tests.benchmarks.bench_locate
"""

from __future__ import annotations

import statistics

import torch

from kc_otel.contract.model import Contract
from kc_otel.diagnose import Located, locate
from tests.diagnose.planted_faults import FAULTS, LAYERS, Fault, conversations, pair

SEEDS = 2
CONTRACT = Contract.model_validate(
    {
        "apiVersion": "kernel-contract/v1",
        "kind": "KernelContract",
        "metadata": {"name": "planted", "version": 1, "owner": "tests"},
        "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "torch"}},
    }
)


def located(fault: Fault | None, layer: int, seed: int) -> Located:
    """The answer for one model."""
    train, inference = pair(fault, layer, seed)
    return locate(CONTRACT, train, inference, conversations(seed=seed), shares=False)


def is_right(fault: Fault, layer: int, found: Located) -> bool:
    """Whether kind, operator and layer are those that were planted."""
    culprit = found.culprit
    expected = (fault.kind, fault.operator, layer if fault.in_layer else None)
    return culprit is not None and (culprit.kind, culprit.boundary.operator, culprit.boundary.layer) == expected


def main() -> None:
    """Print the table of the handbook."""
    torch.set_num_threads(1)
    print("| planted | found | missed | wrong | seconds | tokens |\n| --- | --- | --- | --- | --- | --- |")
    for fault in FAULTS:
        layers = range(LAYERS) if fault.in_layer else (0,)
        runs = [(layer, located(fault, layer, seed)) for layer in layers for seed in range(SEEDS)]
        right = sum(is_right(fault, layer, found) for layer, found in runs)
        missed = sum(found.culprit is None for _, found in runs)
        print(row(fault.name, right, missed, len(runs) - right - missed, [found for _, found in runs]))
    idle = [located(None, 0, seed) for seed in range(5 * SEEDS)]
    named = sum(found.culprit is not None for found in idle)
    print(row(f"nothing, {len(idle)} times", len(idle) - named, 0, named, idle))


def row(name: str, right: int, missed: int, wrong: int, runs: list[Located]) -> str:
    """A line of the table; time and tokens of a run are medians."""
    seconds, tokens = (statistics.median(getattr(found, what) for found in runs) for what in ("seconds", "tokens"))
    return f"| {name} | {right} | {missed} | {wrong} | {seconds:.1f} | {tokens:.0f} |"


if __name__ == "__main__":
    main()
