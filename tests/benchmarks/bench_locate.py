"""Ten faults planted at every depth of a small model: found, missed or wrong, and in which time.

python -m tests.benchmarks.bench_locate
"""

from __future__ import annotations

import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kc_otel.diagnose.located import Located
from kc_otel.diagnose.torch_locate import locate
from tests.diagnose.planted_faults import FAULTS, LAYERS, Fault, conversations, pair
from tests.tools.contracts import contract_of

SEEDS = 2
HEADER = "| planted | found | missed | wrong | seconds |\n| --- | --- | --- | --- | --- |"
Timed = tuple[Located, float]
"""An answer, and the seconds that it took."""
CONTRACT = contract_of("planted", kernels={"train": {"engine": "torch"}, "inference": {"engine": "torch"}})


def timed(*given: Any) -> Timed:
    began = time.monotonic()
    return locate(*given, shares=False), time.monotonic() - began


def located(fault: Fault | None, layer: int, seed: int) -> Timed:
    return timed(CONTRACT, *pair(fault, layer, seed), conversations(seed=seed))


def is_right(fault: Any, layer: int, found: Located) -> bool:
    """Whether kind, operator and layer are those that were planted."""
    culprit = found.culprit
    expected = (fault.kind, fault.operator, layer if fault.in_layer else None)
    return culprit is not None and (culprit.kind, culprit.boundary.operator, culprit.boundary.layer) == expected


def engine_rows() -> None:
    """The table in a live vLLM: each fault in each layer of a mixture of experts, and scales in an int8 checkpoint."""
    from examples.quantised import in_int8
    from examples.tiny_model import tiny_model
    from kc_otel.diagnose.vllm_kernel import VllmKernel
    from tests.engines import planted_in_vllm as live

    with tempfile.TemporaryDirectory() as folder:
        made = live.mixture(tiny_model(Path(".cache")), f"{folder}/mixture")
        kernel = VllmKernel.of(str(made), live.ENGINE)
        train, sequences = live.training(made), live.conversations(kernel._tokenizer)

        def answer(fault: live.EngineFault | None, layer: int) -> Timed:
            with live.planted(kernel, fault, layer):
                return timed(live.CONTRACT, train, kernel, sequences)

        for fault in live.ENGINE_FAULTS:
            runs = [(layer, answer(fault, layer)) for layer in (range(live.LAYERS) if fault.in_layer else (0,))]
            print(fault_row(fault, runs))
        print(idle_row([answer(None, 0) for _ in range(10)]))
        kernel.close()
        runs = []
        for layer in range(live.LAYERS):
            eight = in_int8(made, Path(f"{folder}/int8-{layer}"), products=(f"layers.{layer}.self_attn.o_proj",))
            live.scales_turned(eight, layer)
            kernel = VllmKernel.of(str(eight), live.ENGINE)
            runs.append((layer, timed(live.CONTRACT, train, kernel, sequences)))
            kernel.close()
        print(fault_row(live.EngineFault("transposed scales", lambda *_: None, "o_proj"), runs))


def fault_row(fault: Any, runs: list[tuple[int, Timed]]) -> str:
    right = sum(is_right(fault, layer, found) for layer, (found, _) in runs)
    missed = sum(found.culprit is None for _, (found, _) in runs)
    return row(fault.name, right, missed, len(runs) - right - missed, [answer for _, answer in runs])


def idle_row(idle: list[Timed]) -> str:
    named = sum(found.culprit is not None for found, _ in idle)
    return row(f"nothing, {len(idle)} times", len(idle) - named, 0, named, idle)


def main() -> None:
    """Print the tables of the handbook; the second where vLLM is installed."""
    torch.set_num_threads(1)
    print(HEADER)
    for fault in FAULTS:
        layers = range(LAYERS) if fault.in_layer else (0,)
        runs = [(layer, located(fault, layer, seed)) for layer in layers for seed in range(SEEDS)]
        print(fault_row(fault, runs))
    print(idle_row([located(None, 0, seed) for seed in range(5 * SEEDS)]))
    if find_spec("vllm"):
        print(f"\n{HEADER}")
        engine_rows()


def row(name: str, right: int, missed: int, wrong: int, runs: list[Timed]) -> str:
    """A line of the table; the time of a run is the median."""
    return f"| {name} | {right} | {missed} | {wrong} | {statistics.median(seconds for _, seconds in runs):.1f} |"


if __name__ == "__main__":
    main()
