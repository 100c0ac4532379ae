"""The measuring side of a recorder: batches in, streams and spans out.

`handle` and `expire` run on the measuring thread, `collect` and `exported` on the export thread; one lock is between.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from opentelemetry import trace
from opentelemetry.sdk.metrics.export import Metric
from opentelemetry.util.types import AttributeValue

from kc_otel.contract.model import Contract
from kc_otel.contract.registry import QUANTITIES
from kc_otel.record import capture
from kc_otel.record.measure.packing import SampledBatch
from kc_otel.record.measure.reasons import remedy
from kc_otel.record.measure.storage_grid import coarse_side
from kc_otel.record.operator_rows import observed, observed_routes
from kc_otel.record.pairing import Pair, PairingBuffer, paired_batch, sides_of, versions_of
from kc_otel.record.sampling import Sampler
from kc_otel.record.slice_table import SliceTable
from kc_otel.record.telemetry.accumulate import Batch, WorstToken
from kc_otel.record.telemetry.compare_span import compare_span
from kc_otel.record.telemetry.counters import Counters
from kc_otel.record.telemetry.pair_streams import (
    KernelPair,
    PairStreams,
    TokenExemplar,
    drift_metrics,
    kernel_info,
    train_step,
)
from kc_otel.record.telemetry.sdk_points import gauge
from kc_otel.record.weight_versions import BatchVersions, batch_versions
from kc_otel.record.work import (
    KernelSide,
    LogitsComparison,
    OperatorComparison,
    PairChange,
    RouteComparison,
    RuntimeValue,
    SampledComparison,
    Work,
)

__all__ = ["Measurer"]

_MAX_RETIRED: Final = 8
_STRADDLING: Final = "kc.compare.straddling"
_AHEAD: Final = "a training kernel of an earlier one, which it cannot be; weights= takes (training, inference)"
_LOOKED_AT: Final = 16
"""Batches of a kernel pair whose storage is looked at, and rows of each: what stores them does not change."""
_MAX_LINKS: Final = 128  # what the SDK keeps of a span's links by default


class Measurer:
    """Measures batches into the streams of their kernel pair.

    Args:
        contract: What is measured, on which slices.
        pair: The current kernel pair.
        counters: Where everything that is left out is counted.
        sampler: Which sequences of a pair are measured.
        tracer: Where spans go.
        pairing: Where sides wait for each other.
        start: Start of the cumulative counts, unix nanoseconds.
    """

    def __init__(
        self,
        contract: Contract,
        pair: KernelPair,
        *,
        counters: Counters,
        sampler: Sampler,
        tracer: trace.Tracer,
        pairing: PairingBuffer,
        start: int,
    ) -> None:
        self._contract = contract
        self._table = SliceTable.of(contract)
        self._counters = counters
        self._sampler = sampler
        self._tracer = tracer
        self._pairing = pairing
        self._start = start
        self._lock = threading.Lock()
        self._current = pair
        self._looks_left = _LOOKED_AT
        self._streams: dict[KernelPair, PairStreams] = {}
        self._sent: list[tuple[PairStreams, int]] = []

    @property
    def unpaired(self) -> tuple[int, int]:
        """Sides that wait for their other side, and their tokens."""
        return len(self._pairing), self._pairing.tokens

    @property
    def slices_as_other(self) -> tuple[str, ...]:
        """Slices over the cap."""
        return self._table.over

    def handle(self, work: Work, now: float) -> bool:
        """Measure one batch; `now` is monotonic seconds. True when streams ended and should be exported soon.

        Raises:
            ValueError: If the arrays cannot be compared.
        """
        if isinstance(work, PairChange):
            return self._change_pair(work.pair)
        with capture.measuring(work.ready):
            match work:
                case SampledComparison() | LogitsComparison():
                    self._measure(work)
                case OperatorComparison():
                    self._measure_operator(work)
                case RouteComparison():
                    self._measure_routes(work)
                case RuntimeValue():
                    self._observe(work)
                case KernelSide():
                    self._pair_up(work, now)
        return False

    def expire(self, now: float) -> None:
        """Give up on sides that waited too long."""
        self._counters.dropped("pair-expired", "the other side never came", self._pairing.expire(now))

    def collect(self, now: int) -> list[Metric]:
        """Every stream, and what the recorder says of itself."""
        with self._lock:
            streams = list(self._streams.values())
            self._sent = [(each, each.batches) for each in streams if each.retired]
            metrics = drift_metrics(streams, now)
            steps = train_step(streams, self._start, now)
            pairs = {self._current, *self._streams}
        metrics.append(kernel_info(self._contract.name, pairs, self._start, now))
        metrics.extend([steps] if steps.data.data_points else [])
        metrics.extend(self._counters.metrics(self._start, now))
        try:
            share = self._sampler.share()
        except Exception as error:  # noqa: BLE001 - the user's function; the rest is exported all the same
            self._counters.dropped("sampling-failed", error)
        else:
            metrics.append(
                gauge("kc.recorder.sampling", [({"kc.contract": self._contract.name}, share)], self._start, now)
            )
        return metrics

    def exported(self, error: object | None) -> None:
        """After an export: streams of retired kernel pairs that were delivered completely end here."""
        if error is not None:
            self._counters.export_failed(error)
            with self._lock:
                for streams in self._streams.values():
                    streams.refused()
            return
        self._counters.exported()
        with self._lock:
            for streams, batches in self._sent:
                if streams.retired and streams.batches == batches and self._streams.get(streams.pair) is streams:
                    del self._streams[streams.pair]

    def _change_pair(self, pair: KernelPair) -> bool:
        with self._lock:
            self._current = pair
            self._looks_left = _LOOKED_AT
            for each in self._streams.values():
                each.retired = each.pair != pair
            return any(each.retired for each in self._streams.values())

    def _measure(self, work: SampledComparison | LogitsComparison) -> None:
        logits = isinstance(work, LogitsComparison)
        if work.train is None or work.inference is None:
            raise ValueError("train or inference: is None; give what both kernels say of the tokens")
        rows = capture.laid_out(work.per_token, like="train", trailing=int(logits))
        for reason, count in rows.invalid.items():
            self._counters.invalid(reason, count, _lengths(work.per_token))
        if not rows.kept:
            return
        given = len(rows.kept) + sum(rows.invalid.values())
        membership = self._table.of_batch(work.origin.attributes, rows.kept, given)
        arrays = dict(rows.arrays)
        if isinstance(work, SampledComparison) and work.rewards is not None:
            arrays["rewards"] = capture.per_sequence("rewards", work.rewards, given)[rows.kept]
        train, inference = work.weights
        versions = batch_versions(
            inference, arrays.pop("versions", None), arrays["mask"], arrays["train"].shape[:2], membership
        )
        with self._lock:
            streams = self._streams_of(work.origin.pair)
            add = streams.accumulator.add_logits if logits else streams.accumulator.add_sampled
            batch = add(**arrays, membership=membership, processing=work.processing)
            streams.batches += 1
            if isinstance(train, int) and batch.tokens:
                streams.step = train
                self._add_lag(streams, train, versions)
        for reason, count in batch.invalid.items():
            self._counters.invalid(reason, count, _shapes(arrays) if reason == "shape_mismatch" else None)
        if batch.tokens:
            self._counters.measured(batch.sequences, batch.tokens)
            if not logits:
                self._look_at_storage(rows.arrays)
            try:
                self._explain(work, batch, rows, versions)
            except Exception as error:  # noqa: BLE001 - span processors are foreign code, and the batch is measured
                self._counters.untraced(error)

    def _add_lag(self, streams: PairStreams, train: int, versions: BatchVersions | None) -> None:
        if versions is None:
            return
        if (versions.steps <= train).all():
            streams.accumulator.add_values("weights_lag", versions.lags(train), membership=versions.members)
        else:
            self._counters.noted("weights", f"tokens of step {versions.steps.max()} beside {_AHEAD}")

    def _look_at_storage(self, arrays: Mapping[str, Any]) -> None:
        """Say so where one side was rounded to half precision: the first rows of a pair's first batches tell."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        few = {name: arrays.get(name) for name in ("train", "inference", "mask")}
        batch = SampledBatch.of(*(each if each is None else each[:_LOOKED_AT] for each in few.values()))
        filled = np.flatnonzero(batch.lengths)
        if filled.size:
            block = batch.block(filled)
            if coarse := coarse_side(block.train, block.inference):
                self._counters.noted(coarse.side, coarse)

    def _measure_operator(self, work: OperatorComparison) -> None:
        if work.train.shape != work.inference.shape:
            shapes = " and ".join(str(tuple(output.shape)) for output in (work.train, work.inference))
            why = f"the outputs of operator {work.operator} have shapes {shapes}"
            self._counters.invalid("shape_mismatch", 1, why)
            return
        found = observed(work)
        of_members = self._table.of_batch(work.origin.attributes, range(found.members), found.members)
        with self._lock:
            streams = self._streams_of(work.origin.pair)
            fits = streams.operators.has_room(work.operator)
            if fits and found.member.size:
                streams.operators.add(work.operator, found.values, of_members[found.member])
                streams.batches += 1
        if not fits:
            why = f"no clause names {work.operator}, and max_series leaves no more room"
            self._counters.dropped("too-many-operators", why)
            return
        why = f"rows of {work.operator} are not finite on one side"
        self._counters.invalid("operator_not_finite", found.not_finite, why)
        if found.member.size:
            self._counters.measured(0, 0)

    def _measure_routes(self, work: RouteComparison) -> None:
        members, found = observed_routes(work)
        of_members = self._table.of_batch(work.origin.attributes, range(members), members)
        left_out = 0
        with self._lock:
            streams = self._streams_of(work.origin.pair)
            for name, member, values in found:
                if streams.operators.has_room(name):
                    streams.operators.add(name, {"route_disagreement": values}, of_members[member])
                else:
                    left_out += 1
            streams.batches += 1
        why = "no clause names the routers of some layers, and max_series leaves no more room"
        self._counters.dropped("too-many-operators", why, left_out)
        self._counters.measured(0, 0)

    def _observe(self, work: RuntimeValue) -> None:
        values = np.atleast_1d(capture.on_host(work.value)).astype(np.float64)
        members = self._table.of_batch(work.origin.attributes, range(values.size), values.size)
        known = QUANTITIES[work.quantity]
        if values.ndim != 1 or not ((values >= known.low) & (values <= known.high)).all():
            raise ValueError(f"{work.quantity}: {values} are not numbers from {known.low:g} to {known.high:g}")
        with self._lock:
            streams = self._streams_of(work.origin.pair)
            streams.accumulator.add_values(work.quantity, values, membership=members)
            streams.batches += 1
        self._counters.measured(0, 0)

    def _explain(
        self,
        work: SampledComparison | LogitsComparison,
        batch: Batch,
        rows: capture.Rows,
        versions: BatchVersions | None,
    ) -> None:
        """A span for the batch, and its worst token as an exemplar that points to the span."""
        worst, end = batch.worst, time.time_ns()
        train, inference = work.weights
        if inference is None and versions is not None:
            inference = str(versions)
        weights = {
            name: version
            for name, version in (("kc.weights.train", train), ("kc.weights.inference", inference))
            if version is not None
        }
        span = compare_span(
            self._tracer,
            {
                "kc.contract": self._contract.name,
                "kc.contract.version": self._contract.metadata.version,
                "kc.contract.hash": self._contract.hash,
                "kc.kernel.train": work.origin.pair.train.fingerprint,
                "kc.kernel.inference": work.origin.pair.inference.fingerprint,
                "kc.compare.sequences": batch.sequences,
                "kc.compare.tokens": batch.tokens,
                "kc.compare.slices": batch.slices,
                "kc.compare.tv_token": batch.tv_token,
                **({} if worst is None else _worst(worst, rows.kept)),
                **({} if versions is None or work.weights[1] is not None else {_STRADDLING: versions.straddling}),
                **weights,
            },
            parent=work.origin.parent,
            links=work.origin.links[:_MAX_LINKS],
            start=work.origin.at,
            end=end,
        )
        if worst is not None and span.is_valid and span.trace_flags.sampled:
            with self._lock:
                self._streams_of(work.origin.pair).explain(TokenExemplar(worst, span, end, weights))

    def _pair_up(self, work: KernelSide, now: float) -> None:
        rows = capture.laid_out(work.per_token, like="logprobs")
        for reason, count in rows.invalid.items():
            self._counters.invalid(reason, count, _lengths(work.per_token))
        if not capture.one_shape(rows.arrays):
            self._counters.invalid("shape_mismatch", len(rows.kept), _shapes(rows.arrays))
            return
        groups: defaultdict[Hashable, list[Pair]] = defaultdict(list)
        for key, side in sides_of(work, rows):
            if work.one_key is None and not self._sampler.takes(key):
                self._counters.unsampled()
                continue
            pair, evicted = self._pairing.add(work.role, key, side, now)
            self._counters.dropped("pair-evicted", "too many tokens wait for their other side", evicted)
            if pair is not None and pair.comparable:
                groups[versions_of(pair)].append(pair)
            elif pair is not None:
                self._counters.invalid("token_mismatch", 1)
        for pairs in groups.values():
            self._measure(paired_batch(work, pairs))

    def _streams_of(self, pair: KernelPair) -> PairStreams:
        streams = self._streams.get(pair)
        if streams is None:
            streams = PairStreams(
                self._contract.name,
                pair,
                self._table.names,
                time.time_ns(),
                by_sequence=self._contract.by_sequence,
                reward_range=self._contract.assumptions.reward_range,
                operators=self._contract.operators,
                more_operators=self._table.more_operators,
            )
            # A pair of which one side was sampled before a roll-out and the other scored after it still counts, and
            # its stream ends with the next export.
            streams.retired = pair != self._current
            self._streams[pair] = streams
            self._forget_oldest()
        return streams

    def _forget_oldest(self) -> None:
        """Bound what a dead endpoint and many roll-outs can make us keep."""
        retired = [each for each in self._streams.values() if each.retired]
        for each in retired[: max(len(retired) - _MAX_RETIRED, 0)]:
            del self._streams[each.pair]
            self._counters.dropped(
                "never-exported", "a retired kernel pair could not be exported in time", each.batches
            )


def _worst(token: WorstToken, kept: Sequence[int]) -> dict[str, AttributeValue | None]:
    return {
        "kc.compare.worst.abs_log_ratio": token.abs_log_ratio,
        "kc.compare.worst.sequence": kept[token.row],
        "kc.compare.worst.position": token.position,
        "kc.compare.worst.token_id": token.token_id,
    }


def _shapes(arrays: Mapping[str, Any]) -> str:
    """The reason's words, and what was handed over."""
    given = ", ".join(f"{name} {tuple(data.shape)}" for name, data in arrays.items() if data is not None)
    return f"{given}. {remedy('shape_mismatch')}"


def _lengths(arrays: Mapping[str, Any]) -> str:
    """The reason's words for lists, and the first sequence whose arrays differ in length."""
    lists = {name: tree for name, tree in arrays.items() if isinstance(tree, list) and name != "advantages"}
    for row, each in enumerate(zip(*lists.values(), strict=False)):
        lengths = [capture.on_host(one).size for one in each]
        if len(set(lengths)) > 1:
            given = ", ".join(f"{name} {length}" for name, length in zip(lists, lengths, strict=True))
            return f"sequence {row} has {given} tokens. {remedy('shape_mismatch')}"
    return remedy("shape_mismatch")
