"""Cores whose evaluations say what a test wants."""

from collections.abc import Callable, Iterable, Mapping

from kc_otel.judge.recorders import KernelInfo
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.core import Core

__all__ = ["script"]

_NUMBERS = {"PASS": (0.01, 0.005, 0.015), "INCONCLUSIVE": (0.02, 0.01, 0.03), "FAIL": (0.05, 0.04, 0.06)}
_DECLARED = {"engine": "vllm", "dtype": "bfloat16"}


def script(
    core: Core, told: Callable[[], Mapping[str, Mapping[str, str]]], reported: Callable[[], Iterable[str]]
) -> None:
    """Have these statuses told of versions, by slice, and these versions say that they are what was declared."""

    def evaluate(now: float, _table: object = None) -> dict[str, Evaluation]:
        verdicts = tuple(
            Verdict(
                Cell("policy", "token-tv", slice, "trainA", version), Status(said), now, 0.02, *_NUMBERS[said], 3000,
                "short", "betting", "numbers", 1, core.contracts["policy"].hash, "population",
            )
            for version, statuses in told().items()
            for slice, said in statuses.items()
        )  # fmt: skip
        return {"policy": Evaluation(now, verdicts)}

    core.evaluator.evaluate = evaluate  # type: ignore[method-assign]
    core.evaluator.kernels = lambda _: tuple(  # type: ignore[method-assign]
        KernelInfo("inference", version, _DECLARED, 0.0) for version in reported()
    )
