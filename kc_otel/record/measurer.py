"""The measuring side of a recorder: batches in, streams and spans out.

Callers put batches into a bounded queue; a thread measures them, and the export thread collects. One lock is between
the two. Nothing here waits on a caller's thread but `flush` and `close`, for as long as they are told to.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from opentelemetry import trace
from opentelemetry.sdk.metrics.export import Metric
from opentelemetry.util.types import AttributeValue

from kc_otel.contract.input_reasons import remedy
from kc_otel.contract.limits import bucket_layouts
from kc_otel.contract.model import NUMBER_FORMATS, Contract, declared_apart
from kc_otel.contract.registry.clause_metrics import RECORDED, Unit
from kc_otel.contract.slices import LAG, LENGTH, OF_TOKENS
from kc_otel.record.export_loop import VERSION
from kc_otel.record.kernel import KernelPair
from kc_otel.record.measure.arrays import as_bool, on_host
from kc_otel.record.measure.blocks import SampledBatch
from kc_otel.record.measure.checks import same_shape
from kc_otel.record.measure.rounding import coarse_side, equal_sides
from kc_otel.record.operator_drift import observed
from kc_otel.record.pairing import Pair, PairingBuffer, paired_batch, prompt_names, sides_of, versions_of
from kc_otel.record.sampling import Sampler
from kc_otel.record.slice_table import Places, SliceTable, each_row
from kc_otel.record.telemetry.accumulate import Accumulator, Batch
from kc_otel.record.telemetry.prompt_means import Rollouts
from kc_otel.record.telemetry.recorder_points import (
    Counters,
    PairStreams,
    RecorderStats,
    TokenExemplar,
    drift_metrics,
    gauge,
    kernel_info,
    train_step,
)
from kc_otel.record.weight_versions import BatchVersions, Parts, batch_versions, parts_by_lag
from kc_otel.record.work import QueuedBatch, Rows, Weights, Work, laid_out, measuring, per_sequence
from kc_otel.record.worker import BoundedWorker

_MAX_RETIRED: Final = 8
_WORK_BYTES: Final = 1024
"""Bytes that a queued batch counts besides its arrays, so that empty batches cannot pile up either."""
_EXPIRY_SECONDS: Final = 1.0
_REASONS: Final = {
    "failed": ("measure-failed", ""),
    "closed": ("shutdown", "the recorder is shut down"),
    "queue-full": ("queue-full", "measuring is slower than recording: lower sampling or raise queue_bytes"),
    "too-large": ("too-large", "raise queue_bytes"),
}
"""Reasons of the worker -> the recorder's, and what to do about it."""
_AHEAD_OF_TRAINER: Final = (
    "a training kernel of an earlier one, which it cannot be; weights= takes (training, inference)"
)
_STORAGE_LOOKS: Final = 16
"""Batches of a kernel pair whose storage is looked at, and rows of each: what stores them does not change."""
_MAX_LINKS: Final = 128  # the SDK's default limit of links per span


class Measurer:
    """Measures batches into the streams of their kernel pair; counts are cumulative from when it was made.

    Arguments are those of the recorder. Where streams end and should be exported soon it calls `request_export`.
    """

    request_export: Callable[[], object] = int

    def __init__(
        self,
        contract: Contract,
        pair: KernelPair,
        *,
        sampler: Sampler,
        tracer_provider: trace.TracerProvider | None,
        queue_bytes: int,
        pairing_tokens: int,
        pairing_seconds: float,
        serves: bool | Callable[[], bool],
    ) -> None:
        self._contract = contract
        self._serves = serves if callable(serves) else lambda: serves
        self.table: Final = SliceTable.of(contract)
        self.counters: Final = Counters(contract.name)
        self._sampler = sampler
        self._tracer = trace.get_tracer("kc_otel", VERSION, tracer_provider)
        self._pairing = PairingBuffer(max_tokens=pairing_tokens, max_age=pairing_seconds)
        self._start = time.time_ns()
        self._lock = threading.Lock()
        self._current = pair
        self._closed = False
        self._looks_left = _STORAGE_LOOKS
        # Of several ranks the first alone makes the observations of a step: those of the others depend on them.
        first, assumed = os.environ.get("RANK", "0") == "0", contract.assumptions
        self._accumulator = partial(
            Accumulator,
            self.table.names,
            recorded=contract.recorded,
            averaged=[key for key in contract.averaged if first or RECORDED[key].per is not Unit.STEP],
            # The evaluator holds the sequences that fail an input check against the number of those that are measured.
            sampling=["sequence_tokens", *(["advantage_abs"] if assumed.advantage_max is not None else [])],
            operators=contract.operators,
            more_operators=self.table.more_operators,
            reward_range=assumed.reward_range,
            patience=pairing_seconds,
        )
        self._of_all = ["sequence_tokens"] if assumed.horizon is None else []
        self._layouts = bucket_layouts(contract)
        self._streams: dict[KernelPair, PairStreams] = {}
        self._left, self._left_sent = set[KernelPair](), frozenset[KernelPair]()  # not said yet that they are left
        self._sent: list[tuple[PairStreams, int]] = []
        self._worker: BoundedWorker[Work] = BoundedWorker(
            self._handle_all, self._dropped, name="kc-otel-measure", max_bytes=queue_bytes, wake=self._until_expiry
        )

    def submit(self, work: QueuedBatch) -> None:
        """Queue a copy of a batch that holds the caller's own arrays, or count why not. Never raises."""
        try:
            size = _WORK_BYTES + work.nbytes
        except Exception as error:  # noqa: BLE001 - whatever it was that the caller gave
            self.counters.dropped("capture-failed", error)
            return
        self._worker.put(work.taken, size)

    def rollout(self, pair: KernelPair) -> None:
        """Make `pair` the current one, after what is queued; the streams of other pairs are exported once more."""
        if self._worker.open:
            self._worker.put(lambda: pair, 0)

    def flush(self, timeout: float) -> bool:
        """Measure the queue; return True if that was done within `timeout` seconds."""
        return self._worker.flush(timeout)

    def close(self, timeout: float) -> bool:
        """Measure the queue and take no more; prompts that wait for more rollouts count with those that came."""
        drained = self._worker.close(timeout)
        self._closed = True
        self._expire_prompts(math.inf)
        return drained

    def stats(self) -> RecorderStats:
        """Return the counts so far."""
        batches, size = self._worker.depth()
        return replace(
            self.counters.values(),
            queued_batches=batches,
            queued_bytes=size,
            unpaired=len(self._pairing),
            unpaired_tokens=self._pairing.tokens,
            slices_as_other=self.table.over,
        )

    def _handle_all(self, waiting: Sequence[Work]) -> None:
        now = time.monotonic()
        self.counters.dropped("pair-expired", "the other side never came", self._pairing.expire(now))
        self._expire_prompts(now)
        for work in waiting:
            self.handle(work, time.monotonic())

    def _until_expiry(self) -> float | None:
        """Sides and prompts that wait for others have to be given up in time, whether anything else comes or not."""
        with self._lock:
            waiting = len(self._pairing) or any(stream.accumulator.waiting for stream in self._streams.values())
        return _EXPIRY_SECONDS if waiting else None

    def _dropped(self, reason: str, why: object, count: int) -> None:
        known, remedy = _REASONS.get(reason, (reason, ""))
        self.counters.dropped(known, f"{why}; {remedy}" if remedy else why, count)

    def handle(self, work: Work, now: float) -> None:
        """Measure one batch; `now` is monotonic seconds. ValueError if the arrays cannot be compared."""
        if isinstance(work, KernelPair):
            self._change_pair(work)
            return
        with measuring(work.ready):
            match work.kind:
                case "sampled" | "logits":
                    self._measure(work)
                case "operator" | "routes" | "value":
                    self._observe(work)
                case "side":
                    self._pair_up(work, now)

    def _expire_prompts(self, now: float) -> None:
        with self._lock:
            for stream in self._streams.values():
                stream.accumulator.expire(now)
                self.counters.prompts(stream.accumulator.take_outcomes())

    def collect(self, now: int) -> list[Metric]:
        """Every stream, and what the recorder says of itself."""
        with self._lock:
            streams = list(self._streams.values())
            self._sent = [(stream, stream.batches) for stream in streams if stream.retired]
            metrics = drift_metrics(streams, now)
            self.counters.points = sum(len(metric.data.data_points) for metric in metrics)
            steps = train_step(streams, self._start, now)
            current = self._current
            self._left_sent = frozenset(self._left)
            pairs = {current, *self._streams, *self._left}
        in_use = None if self._closed and self._serves() else current
        metrics.append(kernel_info(self._contract.name, pairs, in_use, self._start, now))
        metrics.extend([steps] if steps.data.data_points else [])
        metrics.extend(self.counters.metrics(self._start, now))
        try:
            share = self._sampler.share()
        except Exception as error:  # noqa: BLE001 - the user's function; the rest is exported all the same
            self.counters.dropped("sampling-failed", error)
        else:
            shares = [({"kc.contract": self._contract.name}, share)]
            metrics.append(gauge("kc.recorder.sampling", shares, self._start, now))
        return metrics

    def exported(self, error: object | None) -> None:
        """After an export: streams of retired kernel pairs that were delivered completely end here."""
        if error is not None:
            self.counters.export_failed(error)
            return
        self.counters.exported()
        with self._lock:
            self._left -= self._left_sent
            for streams, batches in self._sent:
                if streams.retired and streams.batches == batches and self._streams.get(streams.pair) is streams:
                    del self._streams[streams.pair]

    def _change_pair(self, pair: KernelPair) -> None:
        with self._lock:
            self._left.add(self._current)
            self._current = pair
            self._looks_left = _STORAGE_LOOKS
            for stream in self._streams.values():
                stream.retired = stream.pair != pair
            ended = any(stream.retired for stream in self._streams.values())
        if ended:
            self.request_export()

    def _measure(self, work: QueuedBatch) -> None:
        logits, rewards = work.kind == "logits", work.arrays.get("rewards")
        if work.arrays["train"] is None or work.arrays["inference"] is None:
            raise ValueError("train or inference: is None; give what both kernels say of the tokens")
        rows = laid_out(work.per_token, like="train", trailing=int(logits))
        self._count_ragged(work, rows)
        given = rows.given
        prompts = _prompts_of(work, given)
        rows = self._sampled_prompts(work, rows, prompts)
        if not rows.kept:
            return
        arrays = dict(rows.arrays)
        if rewards is not None:
            arrays["rewards"] = per_sequence("rewards", rewards, given)[rows.kept]
        train, inference = work.settings["weights"]
        per_token, positions = arrays.pop("versions", None), arrays.pop("positions", None)
        shape, mask = arrays["train"].shape[:2], arrays["mask"]
        fits = mask is None or tuple(mask.shape) == tuple(shape)  # another shape is left to the input checks
        counts = np.ones(shape, dtype=np.bool_) if mask is None or not fits else as_bool(mask)
        places = Places(counts, positions) if self.table.places or OF_TOKENS & self.table.asked else None
        lengths = counts.sum(1).tolist() if LENGTH in self.table.asked else None
        membership = self.table.of_batch(work.attributes, rows.kept, given, lengths)
        versions = batch_versions(inference, per_token, counts, membership)
        parts = parts_by_lag(train, inference, per_token, counts)
        if parts is not None and (LAG in self.table.asked or any(parts.lag)):
            rows, arrays = _in_parts(parts, rows, arrays)
            if parts.mask is not None:
                lengths = None if lengths is None else parts.mask.sum(1).tolist()
                places = None if places is None else places.of_parts(parts.row, parts.mask)
            membership = self.table.of_batch(work.attributes, rows.kept, given, lengths, parts.lag)
        lags = None if parts is None else parts.lag
        of_tokens = self.table.of_tokens(places, each_row(work.attributes, rows.kept, given, lengths, lags))
        rollouts = _rollouts(work, prompts, rows.kept, parts)
        with self._lock:
            streams = self._streams_of(work.pair)
            batch = self._add(streams.accumulator, work)(
                **arrays,
                membership=membership,
                processing=work.settings["processing"],
                rollouts=rollouts,
                places=places if self.table.places else None,
                parts=of_tokens,
            )
            streams.batches += 1
            self.counters.prompts(streams.accumulator.take_outcomes())
            self._add_step(streams, train if batch.tokens else None, inference, versions)
        self._count_failed(work.pair, batch, arrays, membership if fits or LENGTH not in self.table.asked else None)
        if batch.tokens:
            self.counters.count(batches=1, sequences=batch.sequences, tokens=batch.tokens)
            if (unchecked := batch.why.get("valid")) is not None:
                self.counters.noted("unchecked", unchecked)
            if not logits:
                self._look_at_storage(rows.arrays)
            try:
                self._explain(work, batch, rows, versions)
            except Exception as error:  # noqa: BLE001 - span processors are foreign code, and the batch is measured
                self.counters.untraced(error)

    def _sampled_prompts(self, work: QueuedBatch, rows: Rows, prompts: Sequence[Hashable] | None) -> Rows:
        """The rows whose prompts are in the sample of their step, where prompts are sampled and not batches."""
        if prompts is None or not work.settings.get("by_prompt"):
            return rows
        step = work.settings["weights"][0]
        taken = [place for place, row in enumerate(rows.kept) if self._sampler.takes((step, prompts[row]))]
        self.counters.count(unsampled=int(not taken))
        arrays = {name: data if data is None else data[taken] for name, data in rows.arrays.items()}
        return replace(rows, arrays=arrays, kept=[rows.kept[place] for place in taken])

    def _add(self, accumulator: Accumulator, work: QueuedBatch) -> Callable[..., Batch]:
        if work.kind == "logits":
            return accumulator.add_logits
        density = work.settings["density"]
        return partial(
            accumulator.add_sampled, density=self._contract.assumptions.density if density is None else density
        )

    def _count_failed(
        self, pair: KernelPair, batch: Batch, arrays: Mapping[str, Any], membership: NDArray[np.bool_] | None
    ) -> None:
        """Count the sequences that failed a check, on their slices where these are known."""
        for reason, failed in batch.failed.items():
            why = _shapes(arrays) if reason == "shape_mismatch" else _found(reason, batch.why)
            on = None if membership is None else self.table.counted(membership[failed])
            self.counters.invalid(reason, failed.size, pair, why, on)

    def _add_step(
        self, streams: PairStreams, train: Weights, inference: Weights, versions: BatchVersions | None
    ) -> None:
        if None not in (train, inference) and train != inference and str in map(type, (train, inference)):
            said = f"weights {train!r} and {inference!r} are names: the lag is unknown, and drift includes staleness"
            self.counters.noted("weights", f"{said}; pass optimizer steps")
        if not isinstance(train, int):
            return
        streams.step = train
        if versions is None:
            return
        if (versions.steps <= train).all():
            lags = (train - versions.steps).astype(np.float64)
            streams.accumulator.add_values({"weights_lag": lags}, versions.members)
        else:
            self.counters.noted("weights", f"tokens of step {versions.steps.max()} beside {_AHEAD_OF_TRAINER}")

    def _look_at_storage(self, arrays: Mapping[str, Any]) -> None:
        """Say so where one side was rounded or copied: the first rows of a pair's first batches tell."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        few = {name: arrays.get(name) for name in ("train", "inference", "mask")}
        batch = SampledBatch.of(*(array if array is None else array[:_STORAGE_LOOKS] for array in few.values()))
        filled = np.flatnonzero(batch.lengths)
        if filled.size:
            block = batch.block(filled)
            for kind, look in (("rounded", coarse_side), ("equal", equal_sides)):
                if said := look(block.train, block.inference):
                    self.counters.noted(kind, said)

    def _observe(self, work: QueuedBatch) -> None:
        found = observed(work)
        of_members, left_out = np.zeros((0, 0), dtype=np.bool_), []
        if found.observations:
            of_members = self.table.of_batch(work.attributes, range(found.members), found.members)
        with self._lock:
            streams = self._streams_of(work.pair)
            for name, member, values in found.observations:
                if not streams.accumulator.add_values(values, of_members[member], name):
                    left_out.append(name)
            streams.batches += 1
        said = f"no clause names {', '.join(left_out[:8])}, and max_series leaves no more room"
        self.counters.dropped("too-many-operators", said, len(left_out))
        for reason, rows, given, why in found.invalid:
            self._count_invalid(reason, work, rows, given, why)
        if len(left_out) < len(found.observations):
            self.counters.count(batches=1)

    def _explain(self, work: QueuedBatch, batch: Batch, rows: Rows, versions: BatchVersions | None) -> None:
        """A span for the batch, and its worst token as an exemplar that points to the span."""
        worst, end = batch.worst, time.time_ns()
        train, inference = work.settings["weights"]
        if inference is None and versions is not None:
            inference = str(versions)
        named = {"kc.weights.train": train, "kc.weights.inference": inference}
        weights = {name: version for name, version in named.items() if version is not None}
        attributes: dict[str, AttributeValue] = {
            "kc.contract": self._contract.name,
            "kc.contract.version": self._contract.metadata.version,
            "kc.contract.hash": self._contract.hash,
            "kc.kernel.train": work.pair.train.fingerprint,
            "kc.kernel.inference": work.pair.inference.fingerprint,
            "kc.compare.sequences": batch.sequences,
            "kc.compare.tokens": batch.tokens,
            "kc.compare.slices": batch.slices,
            "kc.compare.tv_token": batch.tv_token,
            **weights,
        }
        if worst is not None:
            attributes["kc.compare.worst.abs_log_ratio"] = abs(worst.log_ratio)
            attributes["kc.compare.worst.sequence"] = rows.kept[worst.row]
            attributes["kc.compare.worst.position"] = worst.position
            if worst.token_id is not None:
                attributes["kc.compare.worst.token_id"] = worst.token_id
        emitted = self._tracer.start_span(
            "kc.compare",
            context=work.parent,
            links=[trace.Link(link) for link in work.links[:_MAX_LINKS] if link.is_valid],
            attributes=attributes,
            start_time=work.at,
        )
        emitted.end(end_time=end)
        span = emitted.get_span_context()
        if worst is not None and span.is_valid and span.trace_flags.sampled:
            with self._lock:
                self._streams_of(work.pair).explain(TokenExemplar(worst, span, end, weights))

    def _pair_up(self, work: QueuedBatch, now: float) -> None:
        rows = laid_out(work.per_token, like="logprobs")
        self._count_ragged(work, rows)
        if not same_shape(*(data for name, data in rows.arrays.items() if name != "advantages" or np.ndim(data) > 1)):
            self._count_invalid("shape_mismatch", work, rows.kept, rows.given, _shapes(rows.arrays))
            return
        groups: defaultdict[Hashable, list[Pair]] = defaultdict(list)
        keyed_apart = work.settings["key"] is None or isinstance(work.settings["key"], list)
        for key, side in sides_of(work, rows):
            if keyed_apart and not self._sampler.takes(key):
                self.counters.count(unsampled=1)
                continue
            pair, evicted = self._pairing.add(key, side, now)
            self.counters.dropped("pair-evicted", "too many tokens wait for their other side", evicted)
            if pair is not None and pair.comparable:
                groups[versions_of(pair)].append(pair)
            elif pair is not None:
                self._count_invalid("token_mismatch", replace(work, attributes=pair.attributes), [0], 1, None)
        for pairs in groups.values():
            self._measure(paired_batch(work, pairs))

    def _count_ragged(self, work: QueuedBatch, rows: Rows) -> None:
        """Count the sequences whose arrays differ in length."""
        if left_out := sorted({*range(rows.given)}.difference(rows.kept)):
            self._count_invalid("shape_mismatch", work, left_out, rows.given, _lengths(work.per_token))

    def _count_invalid(self, reason: str, work: QueuedBatch, rows: Sequence[int], given: int, why: str | None) -> None:
        """Count rows of a batch of `given` that failed an input check: on their slices, where these are known."""
        on = None
        if LENGTH not in self.table.asked:
            with suppress(ValueError):  # attributes of another number of sequences
                on = self.table.counted(self.table.of_batch(work.attributes, rows, given))
        self.counters.invalid(reason, len(rows), work.pair, why, on)

    def _streams_of(self, pair: KernelPair) -> PairStreams:
        streams = self._streams.get(pair)
        if streams is None:
            apart = any(declared_apart(of, NUMBER_FORMATS) for of in (self._contract.kernels, pair))
            given = self._contract.name, pair, time.time_ns(), self._accumulator(apart=apart)
            streams = PairStreams(*given, layouts=self._layouts, of_all=self._of_all)
            # A pair of which one side was sampled before a roll-out and the other scored after it still counts, and
            # its stream ends with the next export.
            streams.retired = pair != self._current
            self._streams[pair] = streams
            # A dead endpoint and many roll-outs must not make us keep them all.
            retired = [stream for stream in self._streams.values() if stream.retired]
            for stream in retired[: max(len(retired) - _MAX_RETIRED, 0)]:
                del self._streams[stream.pair]
                why = "a retired kernel pair could not be exported in time"
                self.counters.dropped("never-exported", why, stream.batches)
        return streams


def _prompts_of(work: QueuedBatch, given: int) -> list[Hashable] | None:
    """The name of each sequence's prompt; None where nobody knows it."""
    found = prompt_names(work.settings.get("groups"), work.arrays.get("prompts"))
    if found is None:
        return None
    names: list[Hashable] = found if isinstance(found, list) else [found] * given
    if len(names) != given:
        raise ValueError(f"groups: {len(names)} for {given} sequences; name the prompt of each")
    return names


def _rollouts(
    work: QueuedBatch, prompts: Sequence[Hashable] | None, kept: Sequence[int], parts: Parts | None
) -> Rollouts:
    """Group the sequences of a batch that answer one prompt."""
    step, at = work.settings["weights"][0], time.monotonic()
    again, whole = (parts.again, parts.whole) if parts is not None and parts.mask is not None else (None, None)
    if prompts is None:
        return Rollouts(step=step, at=at, again=again, whole=whole)
    size = work.settings["group_size"]
    if size is not None:
        size = int(size) if np.ndim(size) == 0 else [size[row] for row in kept]
    return Rollouts([prompts[row] for row in kept], size, step, at, again, whole)


def _in_parts(parts: Parts, rows: Rows, arrays: dict[str, Any]) -> tuple[Rows, dict[str, Any]]:
    """A batch with a row for each part of its sequences, and which tokens that is."""
    if parts.mask is None:
        return rows, arrays
    found = {name: data if data is None else data[parts.row] for name, data in arrays.items()} | {"mask": parts.mask}
    return replace(rows, arrays=found, kept=[rows.kept[row] for row in parts.row.tolist()]), found


def _found(reason: str, why: Mapping[str, str]) -> str | None:
    """Return the finding, followed by the reason's words; None where there is no finding."""
    return f"{why[reason]}. {remedy(reason)}" if reason in why else None


def _shapes(arrays: Mapping[str, Any]) -> str:
    """The reason's words, and what was handed over."""
    given = ", ".join(f"{name} {tuple(data.shape)}" for name, data in arrays.items() if data is not None)
    return f"{given}. {remedy('shape_mismatch')}"


def _lengths(arrays: Mapping[str, Any]) -> str:
    """The reason's words for lists, and the first sequence whose arrays differ in length."""
    lists = {name: tree for name, tree in arrays.items() if isinstance(tree, list) and name != "advantages"}
    for row, row_arrays in enumerate(zip(*lists.values(), strict=False)):
        lengths = [on_host(array).size for array in row_arrays]
        if len(set(lengths)) > 1:
            given = ", ".join(f"{name} {length}" for name, length in zip(lists, lengths, strict=True))
            return f"sequence {row} has {given} tokens. {remedy('shape_mismatch')}"
    return remedy("shape_mismatch")
