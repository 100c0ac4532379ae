"""Senders whose sums are sums of few powers of two: whoever adds them in whatever order has the same bits."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels:
  train: {engine: torch, dtype: float32}
  inference: {engine: vllm, dtype: bfloat16}
slices:
  code: {where: {task: code}}
  prose: {where: {task: prose}}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.06, slices: {code: 0.2}}
  - {id: share, metric: abs_log_ratio, unit: token, statistic: fraction > 0.3, limit: 20%}
  - {id: far, metric: abs_log_ratio, unit: token, statistic: max, limit: 2.0}
observability: {window: 1m, long_window: 5m, min_samples: 200, heartbeat: 30s}
escalation:
  - {on: fail, severity: critical, do: [{webhook: pager}, {route: train-kernel}]}
  - {on: no-data, for: 1m, severity: warning, do: [hold-promotion]}
"""
_SMALL, _LARGE = -6, -2
"""Buckets of scale 0: (1/64, 1/32] and (1/4, 1/2]; what is observed lies at their upper ends."""
_SLICES = ("all", "code", "prose")


@dataclass
class ExactSender:
    """One process that exports, since a Unix time in ns; every other one sends deltas."""

    number: int
    began: int
    _counts: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _last: int = 0

    def export(self, at: int, rng: random.Random, *, drifts: bool) -> bytes:
        """What it has to say at a Unix time in ns; its largest drift is a fifth of what it sees, or half."""
        delta = self.number % 2 == 1
        request = ExportMetricsServiceRequest()
        of = request.resource_metrics.add()
        of.resource.attributes.add(key="service.instance.id").value.string_value = f"trainer-{self.number}"
        scope = of.scope_metrics.add()
        for name in ("tv_token", "abs_log_ratio"):
            data = scope.metrics.add(name=f"kc.drift.{name}", unit="1").exponential_histogram
            data.aggregation_temporality = 1 if delta else 2
            for slice in _SLICES:
                many = rng.randint(40, 60)
                step = [many, many // (2 if drifts else 16)]
                counts = self._counts.setdefault((name, slice), [0, 0])
                counts[:] = [was + more for was, more in zip(counts, step, strict=True)]
                self._add(
                    data, slice, step if delta else counts, (self._last or self.began) if delta else self.began, at
                )
        bad = scope.metrics.add(name="kc.input.invalid", unit="1").sum
        bad.aggregation_temporality, bad.is_monotonic = 2, True
        point = bad.data_points.add(start_time_unix_nano=self.began, time_unix_nano=at, as_int=self.number)
        for key, value in (("kc.contract", "policy"), ("kc.reason", "shape")):
            point.attributes.add(key=key).value.string_value = value
        info = scope.metrics.add(name="kc.kernel.info", unit="1").gauge.data_points.add(time_unix_nano=at, as_int=1)
        for key, value in (("contract", "policy"), ("kernel.role", "train"), ("kernel.version", "a" * 12)):
            info.attributes.add(key=f"kc.{key}").value.string_value = value
        self._last = at
        return request.SerializeToString()

    def _add(self, data: Any, slice: str, counts: list[int], start: int, at: int) -> None:
        point = data.data_points.add(start_time_unix_nano=start, time_unix_nano=at)
        for key, value in (("contract", "policy"), ("slice", slice), ("kernel.train", "a" * 12)):
            point.attributes.add(key=f"kc.{key}").value.string_value = value
        point.attributes.add(key="kc.kernel.inference").value.string_value = "b" * 12
        point.count = sum(counts)
        point.sum = counts[0] / 32 + counts[1] / 2
        point.min, point.max = 1 / 32, 1 / 2
        point.positive.offset = _SMALL
        point.positive.bucket_counts.extend([counts[0], *[0] * (_LARGE - _SMALL - 1), counts[1]])


def rounds(senders: int, count: int, start: float, seed: int = 0) -> Iterator[tuple[float, list[bytes]]]:
    """For so many seconds, what all senders export; the second half drifts more. A fifth of it is sent twice."""
    rng = random.Random(seed)
    fleet = [ExactSender(number, round((start - 1) * 1e9)) for number in range(senders)]
    for second in range(count):
        at = start + second
        bodies = [sender.export(round(at * 1e9), rng, drifts=2 * second >= count) for sender in fleet]
        yield at, bodies + [body for body in bodies if rng.random() < 0.2]
