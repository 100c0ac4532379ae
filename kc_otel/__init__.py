"""kc-otel: kernel contracts on OpenTelemetry.

    import kc_otel

    train, inference = kc_otel.Kernel("torch", dtype="bfloat16"), kc_otel.Kernel("vllm", dtype="fp8")
    recorder = kc_otel.Recorder("contracts/policy.yaml", train=train, inference=inference)
    recorder.compare(train_logprobs, rollout_logprobs, mask=completion_mask)

What `__all__` names is the public interface; everything else may change in any release. Names are imported when they
are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kc_otel.client.router import Router
    from kc_otel.client.training_log import TrainingLog
    from kc_otel.client.webhooks import VerificationError
    from kc_otel.client.webhooks import verify as verify_webhook
    from kc_otel.contract.errors import ContractError
    from kc_otel.contract.load import load as load_contract
    from kc_otel.contract.model import Contract
    from kc_otel.offline.compare import compare
    from kc_otel.record.kernel import Kernel
    from kc_otel.record.recorder import Recorder

__all__ = [
    "Contract",
    "ContractError",
    "Kernel",
    "Recorder",
    "Router",
    "TrainingLog",
    "VerificationError",
    "compare",
    "load_contract",
    "verify_webhook",
]

_HOMES: Final = {
    "Contract": "kc_otel.contract.model:Contract",
    "ContractError": "kc_otel.contract.errors:ContractError",
    "Kernel": "kc_otel.record.kernel:Kernel",
    "Recorder": "kc_otel.record.recorder:Recorder",
    "Router": "kc_otel.client.router:Router",
    "TrainingLog": "kc_otel.client.training_log:TrainingLog",
    "VerificationError": "kc_otel.client.webhooks:VerificationError",
    "compare": "kc_otel.offline.compare:compare",
    "load_contract": "kc_otel.contract.load:load",
    "verify_webhook": "kc_otel.client.webhooks:verify",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - reads a file, and few ask

        return version("kc-otel")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, attribute = _HOMES[name].partition(":")
    value = globals()[name] = getattr(import_module(home), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
