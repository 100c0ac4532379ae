"""The decision table as OpenFeature flags, for services that already ask feature flags which backend serves a request.

    from openfeature import api
    from openfeature.evaluation_context import EvaluationContext
    from kc_otel.client.router import Router
    from kc_otel.client.openfeature import KernelProvider

    api.set_provider(KernelProvider(Router("http://127.0.0.1:4320", contracts=[contract])))
    kernel = api.get_client().get_string_value(
        "policy-7b", "train-kernel", EvaluationContext(attributes={"task": "code"})
    )

| flag                | type    | value                                                          |
| ------------------- | ------- | -------------------------------------------------------------- |
| `<contract>`        | string  | `train-kernel` or `inference-kernel`                           |
| `<contract>`        | boolean | whether the inference kernel may serve the request             |
| `<contract>.halted` | boolean | whether training should stop                                   |
| `<contract>.held`   | boolean | whether promotion should wait                                  |
| `<contract>.resync` | boolean | whether the inference kernel should get the trainer's weights |
| `<contract>.sampling` | float | share of comparisons to measure; the default unless more is asked for |

The context's attributes are those that slices are made of; `kc.kernel.inference` names the kernel version that would
serve, or is in use, and the targeting key, such as a user's id, says whether it is in a canary's share: the reason is
SPLIT then, and the flag's metadata has the weight. Needs `pip install 'kc-otel[openfeature]'`.
"""

# ruff: noqa: ARG002 - the arguments are the interface's

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final, TypeVar

from kc_otel._extras import extra
from kc_otel.client.router import Choice, Router
from kc_otel.judge.decisions import INFERENCE_KERNEL

with extra("openfeature", "the OpenFeature provider"):
    from openfeature.evaluation_context import EvaluationContext
    from openfeature.exception import FlagNotFoundError, TypeMismatchError
    from openfeature.flag_evaluation import FlagResolutionDetails, FlagValueType, Reason
    from openfeature.provider import AbstractProvider, Metadata

__all__ = ["KernelProvider"]

_VERSION: Final = "kc.kernel.inference"
_SEPARATOR: Final = "."
_FLAG_METHODS: Final = frozenset({"halted", "held", "resync"})
"""Flags after the contract's name, which are the router's methods."""

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
        choice = self._choice(flag_key, evaluation_context)
        return self._details(choice.kernel, choice)

    def resolve_boolean_details(
        self, flag_key: str, default_value: bool, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[bool]:
        """Resolve a flag: may the inference kernel serve a request, is training halted, promotion held and the like."""
        contract, _, what = flag_key.rpartition(_SEPARATOR)
        if contract and what in _FLAG_METHODS:
            why: str | None = getattr(self._router, what)(contract, _version(evaluation_context))
            return FlagResolutionDetails(
                why is not None, reason=self._reason(why is not None), flag_metadata=self._about(why)
            )
        choice = self._choice(flag_key, evaluation_context)
        return self._details(choice.kernel == INFERENCE_KERNEL, choice)

    def resolve_float_details(
        self, flag_key: str, default_value: float, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[float]:
        """Share of comparisons to measure."""
        contract, _, what = flag_key.rpartition(_SEPARATOR)
        if not contract or what != "sampling":
            raise FlagNotFoundError(f"{flag_key!r}: write <contract>.sampling")
        share = self._router.sampling(contract, default_value, _version(evaluation_context))
        return FlagResolutionDetails(share, reason=self._reason(share != default_value), flag_metadata=self._about())

    def resolve_integer_details(
        self, flag_key: str, default_value: int, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[int]:
        """Refuse to answer: no flag has this type."""
        raise TypeMismatchError(f"{flag_key!r} is a kernel's name or a yes or no; ask for a string or a boolean")

    def resolve_object_details(
        self,
        flag_key: str,
        default_value: Sequence[FlagValueType] | Mapping[str, FlagValueType],
        evaluation_context: EvaluationContext | None = None,
    ) -> FlagResolutionDetails[Sequence[FlagValueType] | Mapping[str, FlagValueType]]:
        """Refuse to answer: no flag has this type."""
        raise TypeMismatchError(f"{flag_key!r} is a kernel's name or a yes or no; ask for a string or a boolean")

    def _choice(self, contract: str, context: EvaluationContext | None) -> Choice:
        attributes: dict[str, Any] = {} if context is None else dict(context.attributes)
        attributes.pop(_VERSION, None)
        known: dict[str, Any] = {
            name: value for name, value in attributes.items() if isinstance(value, str | bool | Real)
        }
        key = None if context is None else context.targeting_key
        try:
            return self._router.decide(contract, known, _version(context), key=key)
        except LookupError as error:
            raise FlagNotFoundError(str(error.args[0])) from None

    def _details(self, value: T, choice: Choice) -> FlagResolutionDetails[T]:
        split = choice.cause == "canary" and not self._router.stale
        return FlagResolutionDetails(
            value,
            variant=choice.kernel,
            reason=Reason.SPLIT if split else self._reason(choice.cause in {"pin", "route"}),
            flag_metadata=self._about(choice.reason, choice.weight),
        )

    def _reason(self, decided: bool) -> Reason:
        if self._router.stale:
            return Reason.STALE
        return Reason.TARGETING_MATCH if decided else Reason.DEFAULT

    def _about(self, why: str | None = None, weight: float | None = None) -> dict[str, str | int | float | bool]:
        said: dict[str, str | int | float | bool] = {"table": self._router.table.version}
        if why:
            said["reason"] = why
        if weight is not None:
            said["weight"] = weight
        return said


def _version(context: EvaluationContext | None) -> str | None:
    """Version of the inference kernel that a context names."""
    version = None if context is None else context.attributes.get(_VERSION)
    return None if version is None else str(version)
