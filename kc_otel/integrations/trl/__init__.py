"""TRL's GRPO trainer, watched through its public hooks: `instrument(trainer, "contract.yaml")` is the one line."""

from kc_otel.integrations.trl.attach import instrument
from kc_otel.integrations.trl.resync import ResyncWeights
from kc_otel.integrations.trl.watch import InstrumentedTrainer

__all__ = ["InstrumentedTrainer", "ResyncWeights", "instrument"]
