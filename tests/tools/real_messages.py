"""OTLP messages that real Recorders export, for tests and benchmarks of whoever receives them.

A small recurrent language model is run twice: as the training kernel in float32, and as the inference kernel with
weights rounded to int8 by channel and activations to the eight bits of float8 e4m3, from which tokens are sampled. Both
kernels' log-probabilities of those tokens go through a `Recorder` with one of three contracts, and what it exports is
kept as the bytes that OTLP's exporters send.

    messages(Case("rl-rollouts", tokens=1_000), exports=3)

Messages of deltas are what the Collector's cumulativetodelta processor makes of them.
"""

import itertools
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel import Kernel, Recorder
from kc_otel.contract.load import load
from kc_otel.contract.model import Contract
from tests.tools.memory import Memory

__all__ = ["CASES", "CONTRACTS", "INTERVAL", "Case", "Sender", "contract", "drift", "exponential_points", "messages"]

CONTRACTS: Final = ("rl-rollouts", "serving-int8", "twenty-slices")
INTERVAL: Final = 10.0
"""Seconds between two exports."""
_ROOT: Final = Path(__file__).resolve().parents[2]
_FILES: Final = {
    "rl-rollouts": "rl-rollouts-bf16-fp8.yaml",
    "serving-int8": "serving-int8.yaml",
    "twenty-slices": "rl-rollouts-bf16-fp8.yaml",
}
_DOMAINS: Final = (
    *("algebra", "geometry", "number-theory", "probability", "calculus", "combinatorics", "physics", "chemistry"),
    *("biology", "python", "cpp", "sql", "shell", "javascript", "unit-tests", "tool-use", "search", "dialogue"),
    *("summary", "translation"),
)
"""Tasks of an RL mixture, one slice each."""
_LENGTH: Final = 128
"""Tokens of a sequence."""
_MOST_SEQUENCES: Final = 512
"""Sequences of one batch."""
_VOCABULARY: Final = 128
_WIDTH: Final = 32
_NANOSECONDS: Final = 1_000_000_000
_INTERVAL: Final = round(INTERVAL * _NANOSECONDS)
_START: Final = 1_760_000_000 * _NANOSECONDS
_FIRST: Final = _START + _INTERVAL
"""When recording began, and when it was exported first."""


@dataclass(frozen=True)
class Case:
    """What a process has recorded when it exports: about so many tokens at first, under one of CONTRACTS.

    The Collector may have made deltas of it; rewards, advantages and logits are handed over where they are True.
    """

    contract: str
    tokens: int
    delta: bool = False
    rewards: bool = False
    advantages: bool = False
    logits: bool = False

    def __str__(self) -> str:
        extras = [name for name in ("rewards", "advantages", "logits", "delta") if getattr(self, name)]
        return " ".join((f"{self.contract}, {self.tokens:,} tokens", *extras))


CASES: Final = tuple(
    Case(name, tokens, delta, all_of_them, all_of_them, logits)
    for name in CONTRACTS
    for tokens in (10, 1_000, 100_000)
    for delta in (False, True)
    for all_of_them, logits in ((False, False), (True, False), (True, True))
    if not (logits and tokens > 1_000)  # whoever compares full logits does so on few tokens
)
"""Contracts, sizes and extras that tests and benchmarks go through."""


@cache
def contract(name: str) -> Contract:
    loaded = load(_ROOT / "contracts" / _FILES[name])
    if name != "twenty-slices":
        return loaded
    said = loaded.model_dump(mode="json", by_alias=True, exclude_unset=True)
    said["slices"] = {domain: {"where": {"task": domain}} for domain in _DOMAINS}
    said["observability"]["max_series"] = 12_000  # streams of a thousand processes
    return Contract.model_validate(said)


@cache
def drift(sequences: int) -> np.ndarray:
    """Log ratios of sampled tokens between the two kernels, [sequences, tokens]."""
    batch = _rollout(np.random.default_rng(0), sequences, _LENGTH)
    return batch.train.astype(np.float64) - batch.inference


def messages(case: Case, *, exports: int = 3, sender: int = 0) -> list[bytes]:
    """What one process exports, INTERVAL apart: serialized ExportMetricsServiceRequests.

    Between two exports it records a tenth of the case, a sequence at least. A delta message needs the export before it,
    which is not among them. Every sender records other tokens.
    """
    return list(_recorded(case, exports, sender))


class Sender:
    """A process that goes on exporting from a Unix time: one recorder's messages at other times, by another process.

    A thousand processes cost a copy of a message each. Counts cannot go on for ever: after the last message the process
    starts anew, as a restarted job does.
    """

    def __init__(self, bodies: Sequence[bytes], number: int, began: float) -> None:
        self._bodies, self._times = bodies, [_times(body) for body in bodies]
        [self._instance] = _instances(bodies[0])
        self._own = str(uuid.uuid5(uuid.NAMESPACE_OID, f"sender-{number}")).encode()
        self._began = round(began * _NANOSECONDS)
        self._exported = 0

    def export(self) -> bytes:
        run, number = divmod(self._exported, len(self._bodies))
        self._exported += 1
        shift = self._began - _FIRST + run * len(self._bodies) * _INTERVAL
        body = self._bodies[number].replace(self._instance, self._own)
        for time in self._times[number]:
            body = body.replace(time.to_bytes(8, "little"), (time + shift).to_bytes(8, "little"))
        return body


def exponential_points(body: bytes) -> list[Any]:
    points = _points_of(ExportMetricsServiceRequest.FromString(body))
    return [point for metric, point in points if metric.WhichOneof("data") == "exponential_histogram"]


@cache
def _recorded(case: Case, exports: int, sender: int) -> tuple[bytes, ...]:
    promised, capture = contract(case.contract), Memory()
    kernels = promised.kernels
    recorder = Recorder(
        promised,
        train=Kernel.declared(kernels.train),
        inference=Kernel.declared(kernels.inference),
        metric_exporter=capture,
        export_interval=3600.0,
        sampling=1.0,
    )
    rng = np.random.default_rng(sender)
    found = []
    try:
        for number in range(exports + case.delta):
            for batch in _batches(rng, max(case.tokens // 10, 1) if number else case.tokens):
                _record(recorder, rng, batch, case)
            assert recorder.force_flush(60.0)
            found.append(_spaced(encode_metrics(capture.exports[-1]), number))
    finally:
        recorder.shutdown()
    assert not recorder.stats().dropped
    if case.delta:
        # From the last on, because the message before has to be whole.
        found = [_difference(after, before) for before, after in reversed([*itertools.pairwise(found)])][::-1]
    return tuple(message.SerializeToString() for message in found)


@dataclass(frozen=True)
class _Model:
    embedding: np.ndarray
    recurrent: np.ndarray
    head: np.ndarray
    rounded: bool

    def step(self, state: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Next state [n, width] and logits [n, vocabulary]."""
        after = np.tanh(self.embedding[tokens] + state @ self.recurrent)
        if self.rounded:
            after = _float8(after)
        return after, after @ self.head


@cache
def _kernels() -> tuple[_Model, _Model]:
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((_VOCABULARY, _WIDTH)).astype(np.float32)
    recurrent = (0.6 / np.sqrt(_WIDTH) * rng.standard_normal((_WIDTH, _WIDTH))).astype(np.float32)
    head = (3.0 / np.sqrt(_WIDTH) * rng.standard_normal((_WIDTH, _VOCABULARY))).astype(np.float32)
    return (
        _Model(embedding, recurrent, head, rounded=False),
        _Model(embedding, _int8(recurrent), _int8(head), rounded=True),
    )


def _int8(weights: np.ndarray) -> np.ndarray:
    step = np.abs(weights).max(0) / 127
    return (np.rint(weights / step) * step).astype(np.float32)


def _float8(values: np.ndarray) -> np.ndarray:
    """Three bits of mantissa, as float8 e4m3 has."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 16) / 16, exponent).astype(np.float32)


@dataclass(frozen=True)
class _Batch:
    train: np.ndarray
    inference: np.ndarray
    train_logits: np.ndarray | None = None
    inference_logits: np.ndarray | None = None


def _batches(rng: np.random.Generator, tokens: int) -> Iterator[_Batch]:
    length = min(tokens, _LENGTH)
    left = max(tokens // length, 1)
    while left > 0:
        yield _rollout(rng, min(left, _MOST_SEQUENCES), length)
        left -= _MOST_SEQUENCES


def _rollout(rng: np.random.Generator, sequences: int, length: int) -> _Batch:
    """Sequences sampled by the inference kernel, scored by both."""
    train, inference = _kernels()
    of_train = of_inference = np.zeros((sequences, _WIDTH), np.float32)
    tokens = rng.integers(_VOCABULARY, size=sequences)
    found: list[list[np.ndarray]] = [[], [], [], []]
    index = np.arange(sequences)
    for _ in range(length):
        of_train, train_logits = train.step(of_train, tokens)
        of_inference, inference_logits = inference.step(of_inference, tokens)
        logp, logq = _log_softmax(train_logits), _log_softmax(inference_logits)
        up_to = np.cumsum(np.exp(logq), axis=1)
        tokens = np.argmax(up_to > up_to[:, -1:] * rng.random((sequences, 1), np.float32), axis=1)
        whole = (train_logits, inference_logits) if sequences * length <= 16 * _LENGTH else ()
        for kept, values in zip(found, (logp[index, tokens], logq[index, tokens], *whole), strict=False):
            kept.append(values)
    return _Batch(*(np.stack(kept, axis=1) for kept in found if kept))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _record(recorder: Recorder, rng: np.random.Generator, batch: _Batch, case: Case) -> None:
    sequences = len(batch.train)
    attributes = {
        "task": rng.choice(_DOMAINS if case.contract == "twenty-slices" else ["code", "tool-use", "math"], sequences),
        "language": rng.choice(["en", "de", "zh"], sequences),
        "prompt_tokens": rng.choice([512, 16_384], sequences),
        "completion_tokens": rng.choice([800, 6_000], sequences),
    }
    extras: dict[str, Any] = {"attributes": {name: values.tolist() for name, values in attributes.items()}}
    if case.rewards:  # verifiable ones
        extras["rewards"] = (rng.random(sequences) < 0.4).astype(float)
    if case.advantages:  # of a group
        extras["advantages"] = rng.standard_normal(sequences)
    recorder.compare(batch.train, batch.inference, weights=(2, 2), **extras)
    if case.logits and batch.train_logits is not None:
        recorder.compare_logits(batch.train_logits, batch.inference_logits, attributes=extras["attributes"])
    while recorder.stats().queued_batches:  # nothing may be left out for want of room
        assert recorder.force_flush(60.0)


def _spaced(message: Any, number: int) -> Any:
    """The message with times that are INTERVAL apart, however busy the machine was."""
    for _, point in _points_of(message):
        point.start_time_unix_nano = _START
        point.time_unix_nano = _FIRST + number * _INTERVAL
    return message


def _points_of(message: Any) -> Iterator[tuple[Any, Any]]:
    for resource in message.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    yield metric, point


def _difference(later: Any, earlier: Any) -> Any:
    """Make deltas of a message, as the Collector's cumulativetodelta processor does; it cannot know their extremes."""
    before = {(metric.name, _identity(point)): point for metric, point in _points_of(earlier)}
    for metric, point in _points_of(later):
        kind = metric.WhichOneof("data")
        was = before.get((metric.name, _identity(point)))
        if kind == "gauge":
            continue
        getattr(metric, kind).aggregation_temporality = 1
        if was is None:
            continue
        point.start_time_unix_nano = was.time_unix_nano
        if kind == "sum":
            field = point.WhichOneof("value")
            setattr(point, field, getattr(point, field) - getattr(was, field))
            continue
        point.count -= was.count
        point.sum -= was.sum
        point.zero_count -= was.zero_count
        for side in ("positive", "negative"):
            _subtract(getattr(point, side), getattr(was, side))
        point.ClearField("min")
        point.ClearField("max")
    return later


def _subtract(side: Any, was: Any) -> None:
    counts = np.array(side.bucket_counts, np.int64)
    shift = was.offset - side.offset
    counts[shift : shift + len(was.bucket_counts)] -= np.array(was.bucket_counts, np.int64)
    side.bucket_counts[:] = counts.tolist()


def _identity(point: Any) -> bytes:
    return b"".join(sorted(pair.SerializeToString() for pair in point.attributes))


def _instances(body: bytes) -> set[bytes]:
    return {
        pair.value.string_value.encode()
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for pair in resource.resource.attributes
        if pair.key == "service.instance.id"
    }


def _times(body: bytes) -> list[int]:
    """All start times and times in a message, ascending, each once."""
    points = list(_points_of(ExportMetricsServiceRequest.FromString(body)))
    return sorted({time for _, point in points for time in (point.start_time_unix_nano, point.time_unix_nano) if time})
