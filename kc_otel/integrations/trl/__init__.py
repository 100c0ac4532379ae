"""TRL's GRPO trainer, instrumented through its public hooks: `instrument(trainer, "contract.yaml")` is the one line."""

from kc_otel.integrations.transformers import FollowDirectives
from kc_otel.integrations.trl.instrumented_trainer import InstrumentedTrainer, instrument

__all__ = ["FollowDirectives", "InstrumentedTrainer", "instrument"]
