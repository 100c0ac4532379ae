"""An evaluator in this process, as the exporter of a recorder."""

import time

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from kc_otel.judge.evaluator import Evaluator
from tests.tools.memory import Memory
from tests.tools.verdicts import verdicts_of

__all__ = ["Judge"]


class Judge(Memory):
    """Judges each export, as the bytes that a collector would see, and keeps it."""

    def __init__(self, contract):
        super().__init__()
        self.evaluator = Evaluator([contract])

    def export(self, metrics_data, **options):
        assert not self.evaluator.ingest_metrics(encode_metrics(metrics_data), time.time()).rejected
        return super().export(metrics_data, **options)

    def evaluation(self, name="policy"):
        return self.evaluator.evaluate(time.time())[name]

    def verdicts(self):
        return {(v.cell.clause, v.cell.slice): v for v in verdicts_of(self.evaluator, time.time())}
