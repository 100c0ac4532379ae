"""The decision table as OpenFeature flags, for services that already ask feature flags which backend serves a request.

    from openfeature import api
    from openfeature.evaluation_context import EvaluationContext
    from kc_otel.routing.client import Router
    from kc_otel.routing.openfeature import KernelProvider

    api.set_provider(KernelProvider(Router("http://127.0.0.1:4320", contracts=[contract])))
    kernel = api.get_client().get_string_value(
        "policy-7b", "inference-kernel", EvaluationContext(attributes={"task": "code"})
    )

| flag                | type    | value                                                          |
| ------------------- | ------- | -------------------------------------------------------------- |
| `<contract>`        | string  | `train-kernel` or `inference-kernel`                           |
| `<contract>`        | boolean | whether the inference kernel may serve the request             |
| `<contract>.halted` | boolean | whether training should stop                                   |
| `<contract>.held`   | boolean | whether promotion should wait                                  |
| `<contract>.sampling` | float | share of comparisons to measure; the default unless more is asked for |

The context's attributes are those that slices are made of; `kc.kernel.inference` names the kernel version that would
serve. Needs `pip install openfeature-sdk`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from openfeature.evaluation_context import EvaluationContext
from openfeature.exception import ErrorCode
from openfeature.flag_evaluation import FlagResolutionDetails, FlagValueType, Reason
from openfeature.provider import AbstractProvider, Metadata

from kc_otel.contract.slices import Scalar
from kc_otel.routing.client import Router
from kc_otel.routing.table import INFERENCE_KERNEL

__all__ = ["KernelProvider"]

_VERSION: Final = "kc.kernel.inference"
_SEPARATOR: Final = "."

T = TypeVar("T")


class KernelProvider(AbstractProvider):
    """Answers flags from a router's table: no network, no lock, and the last table when the evaluator is gone.

    Args:
        router: It is closed when the provider is shut down.
    """

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router = router

    def get_metadata(self) -> Metadata:
        """Name of the provider."""
        return Metadata(name="kc-otel")

    def shutdown(self) -> None:
        """Close the router."""
        self._router.close()

    def resolve_string_details(
        self, flag_key: str, default_value: str, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[str]:
        """The kernel for a request."""
        try:
            kernel = self._kernel(flag_key, evaluation_context)
        except LookupError as error:
            return _unknown(default_value, error)
        return FlagResolutionDetails(
            kernel, variant=kernel, reason=self._reason(kernel != INFERENCE_KERNEL), flag_metadata=self._about()
        )

    def resolve_boolean_details(
        self, flag_key: str, default_value: bool, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[bool]:
        """Whether the inference kernel may serve a request; whether training is halted or promotion held."""
        contract, _, what = flag_key.rpartition(_SEPARATOR)
        if contract and what in ("halted", "held"):
            why = self._router.halted(contract) if what == "halted" else self._router.held(contract)
            return FlagResolutionDetails(
                why is not None, reason=self._reason(why is not None), flag_metadata=self._about(why)
            )
        try:
            allowed = self._kernel(flag_key, evaluation_context) == INFERENCE_KERNEL
        except LookupError as error:
            return _unknown(default_value, error)
        return FlagResolutionDetails(allowed, reason=self._reason(not allowed), flag_metadata=self._about())

    def resolve_float_details(
        self, flag_key: str, default_value: float, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[float]:
        """Share of comparisons to measure."""
        del evaluation_context
        contract, _, what = flag_key.rpartition(_SEPARATOR)
        if not contract or what != "sampling":
            return _unknown(default_value, LookupError(f"{flag_key!r}: write <contract>.sampling"))
        share = self._router.sampling(contract, default_value)
        return FlagResolutionDetails(share, reason=self._reason(share != default_value), flag_metadata=self._about())

    def resolve_integer_details(
        self, flag_key: str, default_value: int, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[int]:
        """There is no such flag."""
        del evaluation_context
        return _mismatch(flag_key, default_value)

    def resolve_object_details(
        self,
        flag_key: str,
        default_value: Sequence[FlagValueType] | Mapping[str, FlagValueType],
        evaluation_context: EvaluationContext | None = None,
    ) -> FlagResolutionDetails[Sequence[FlagValueType] | Mapping[str, FlagValueType]]:
        """There is no such flag."""
        del evaluation_context
        return _mismatch(flag_key, default_value)

    def _kernel(self, contract: str, context: EvaluationContext | None) -> str:
        attributes: dict[str, Any] = {} if context is None else dict(context.attributes)
        version = attributes.pop(_VERSION, None)
        known: dict[str, Scalar] = {
            name: value for name, value in attributes.items() if isinstance(value, str | bool | int | float)
        }
        return self._router.choose(contract, known, None if version is None else str(version))

    def _reason(self, decided: bool) -> Reason:
        if self._router.stale:
            return Reason.STALE
        return Reason.TARGETING_MATCH if decided else Reason.DEFAULT

    def _about(self, why: str | None = None) -> dict[str, str | int | float | bool]:
        return {"table": self._router.table.version, **({"reason": why} if why else {})}


def _unknown(default: T, error: LookupError) -> FlagResolutionDetails[T]:
    return FlagResolutionDetails(
        default, error_code=ErrorCode.FLAG_NOT_FOUND, error_message=str(error.args[0]), reason=Reason.ERROR
    )


def _mismatch(flag_key: str, default: T) -> FlagResolutionDetails[T]:
    said = f"{flag_key!r} is a kernel's name or a yes or no; ask for a string or a boolean"
    return FlagResolutionDetails(default, error_code=ErrorCode.TYPE_MISMATCH, error_message=said, reason=Reason.ERROR)
