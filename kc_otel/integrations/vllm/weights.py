"""Asking a vLLM engine which weights it has, after a sync from a trainer.

    report = check_weights(llm, model)
    print(report)

Workers answer by a method that the plugin of kc-otel gives them, so they may be other processes.
"""

from __future__ import annotations

from typing import Any

from kc_otel.integrations.vllm.plugin import WEIGHTS_METHOD
from kc_otel.record.weights_arrived import EngineWeights, WeightReport, compare_weights


def check_weights(engine: Any, model: Any, *, before: WeightReport | None = None) -> WeightReport:
    """Compare the weights of a trainer's whole torch module with those of a `vllm.LLM`; nothing of the two changes.

    With an `AsyncLLM`, await `engine.collective_rpc("kc_otel_weights", args=(shapes,))` and give what it returns to
    `EngineWeights.of` and `compare_weights`; over HTTP, in vLLM's development mode, POST /collective_rpc does the same.
    `before` is the report of the sync before this one.

    Raises:
        ValueError: If a tensor has no values, or is split over processes.
    """
    named = [(name, tensor) for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.ndim]
    shapes = {name: list(tensor.shape) for name, tensor in named}
    return compare_weights(
        named, EngineWeights.of(engine.collective_rpc(WEIGHTS_METHOD, args=(shapes,))), before=before
    )
