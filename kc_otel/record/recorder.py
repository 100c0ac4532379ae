"""Recorder that a training or serving program calls with the two kernels' log-probabilities.

It never raises into the program and never waits for it: a call copies its arrays into a bounded queue and returns;
a thread of its own measures them, another exports. Whatever is left out is counted, exported and logged once.

A stream has one writer, so each process has a measurer of its own. A forked child's streams start when it first
records, under a `service.instance.id` of its own; a child that records nothing starts no thread and exports nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import numpy as np
from opentelemetry import context, trace
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID

from kc_otel.contract.fields import operator_name
from kc_otel.contract.load import load
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import QUANTITIES, SAMPLING, Origin
from kc_otel.contract.slices import LENGTH, Scalar
from kc_otel.record.export_loop import DriftLog, ExportLoop, scope_of
from kc_otel.record.guided_loop import Directives, GuidedLoop, Quarantine
from kc_otel.record.kernel import Kernel, KernelPair
from kc_otel.record.measure.arrays import is_tensor
from kc_otel.record.measurer import Measurer
from kc_otel.record.sampling import Sampler
from kc_otel.record.slice_table import Attributes
from kc_otel.record.telemetry import environment
from kc_otel.record.telemetry.recorder_points import RecorderStats
from kc_otel.record.weight_versions import as_version, split
from kc_otel.record.work import Kind, Processing, QueuedBatch, Role, TokenWeights, Tree, Weights
from kc_otel.record.worker import PerProcess

_OBSERVABLE: Final = [key for key, known in (QUANTITIES | SAMPLING).items() if known.source is Origin.RUNTIME]

_log: Final = logging.getLogger("kc_otel")
_alive: Final[weakref.WeakSet[Recorder]] = weakref.WeakSet()


class Recorder(PerProcess):
    """Measures how far two kernels of one policy are apart and exports it as OpenTelemetry metrics and spans.

    >>> import numpy as np
    >>> recorder = Recorder("contracts/rl-rollouts-bf16-fp8.yaml", train=Kernel("torch", dtype="bfloat16"),
    ...                     inference=Kernel("vllm", dtype="fp8"))
    >>> rollout = np.log([[0.5, 0.4], [0.5, 0.4]])                             # [sequences, tokens]
    >>> recorder.compare(rollout + 0.01, rollout)
    >>> recorder.shutdown()
    True

    The standard OTEL_* environment variables configure the export, as for any OpenTelemetry SDK; OTEL_SDK_DISABLED=true
    turns it off. Methods may be called from any thread. A forked child that goes on recording
    writes streams of its own; a child that exits through `os._exit`, as those of multiprocessing do, must call
    `shutdown` itself.

    Args:
        contract: The contract, or the path of its YAML file.
        train: The kernel that computes gradients; None for what the contract declares.
        inference: The kernel that samples; None for what the contract declares.
        sampling: Share of batches that are measured, or a function that returns it; None for the contract's.
        metric_exporter: Exporter of the metrics; None for the one that OTEL_METRICS_EXPORTER and related variables set.
        tracer_provider: Provider of the spans; None for the global one.
        queue_bytes: Largest size of the copied arrays that wait to be measured, bytes.
        pairing_tokens: Largest number of tokens that wait for their other side in `sampled` and `scored`; about 16
            bytes each.
        pairing_seconds: Seconds that they wait.
        export_interval: Seconds between exports; None for OTEL_METRIC_EXPORT_INTERVAL, or a third of the contract's
            heartbeat where that is not set, 60 s at most.
        log: Source of `scalars`, such as a `kc_otel.TrainingLog`.
        resource: Attributes of the resource that the program knows, such as `service.instance.id`; OTEL_SERVICE_NAME
            and OTEL_RESOURCE_ATTRIBUTES take precedence.
        serves: Whether the kernels are no longer in use once this recorder shuts down, or a function that returns it
            then; False for a program that measures what another one serves.

    Raises:
        ValueError: If the contract or an argument is not valid.
        OSError: If the contract cannot be read.
    """

    _measurer: Measurer | None
    _loop: ExportLoop | None
    _lock: threading.Lock

    def __init__(
        self,
        contract: Contract | str | os.PathLike[str],
        *,
        train: Kernel | None = None,
        inference: Kernel | None = None,
        sampling: float | Callable[[], float] | None = None,
        metric_exporter: MetricExporter | None = None,
        tracer_provider: trace.TracerProvider | None = None,
        queue_bytes: int = 256 * 1024 * 1024,
        pairing_tokens: int = 4_000_000,
        pairing_seconds: float = 900.0,
        export_interval: float | None = None,
        log: DriftLog | None = None,
        resource: Mapping[str, str] | None = None,
        serves: bool | Callable[[], bool] = True,
    ) -> None:
        self.contract: Final = contract if isinstance(contract, Contract) else load(contract)
        for name, value in (("queue_bytes", queue_bytes), ("pairing_tokens", pairing_tokens)):
            if value < 1:
                raise ValueError(f"{name}: {value!r} leaves no room for anything; leave it out for the default")
        self.log: Final = log
        kernels = self.contract.kernels
        self._known: set[Kernel] = set()
        self._pair = self._met(
            KernelPair(train or Kernel.declared(kernels.train), inference or Kernel.declared(kernels.inference))
        )
        self._sampler = Sampler(self.contract.observability.sampling if sampling is None else sampling)
        self._metric_exporter = metric_exporter
        self._make_measurer = partial(
            Measurer,
            self.contract,
            sampler=self._sampler,
            tracer_provider=tracer_provider,
            queue_bytes=queue_bytes,
            pairing_tokens=pairing_tokens,
            pairing_seconds=pairing_seconds,
            serves=serves,
        )
        if export_interval is not None and not export_interval > 0.0:
            raise ValueError(f"export_interval: {export_interval!r} is not a number of seconds above 0")
        heartbeat = self.contract.observability.heartbeat
        self._interval = environment.export_interval(heartbeat) if export_interval is None else export_interval
        self._resource = resource
        self._stopped = environment.sdk_disabled()
        self._instance = ""
        super().__init__()
        _alive.add(self)
        self._running()
        atexit.register(self.shutdown)

    def compare(
        self,
        train_logprobs: Any,
        inference_logprobs: Any,
        *,
        mask: Any = None,
        attributes: Attributes = None,
        advantages: Any = None,
        rewards: Any = None,
        token_ids: Any = None,
        inference_token_ids: Any = None,
        kept: tuple[Any, Any] | None = None,
        processing: tuple[Processing, Processing] | None = None,
        weights: tuple[Weights, TokenWeights] | None = None,
        groups: Any = None,
        group_size: int | Sequence[int] | None = None,
        prompt_ids: Any = None,
        density: bool | None = None,
        links: Sequence[trace.SpanContext] = (),
        key: Hashable = None,
        presampled: bool = False,
    ) -> None:
        """Compare the kernels on tokens that the inference kernel sampled.

        Take both before any clipping or truncation, at the same temperature and sampling parameters. Arrays are NumPy
        or torch, of any floating dtype and on any device; one sequence [tokens], a batch [sequences, tokens], or a list
        of sequences of different lengths.

        Args:
            train_logprobs: log P(y), nats, under the training kernel.
            inference_logprobs: log Q(y), nats, under the inference kernel.
            mask: True where a token counts, or a weight, which counts in full if above 0; padding and prompts do not.
            attributes: Attributes that decide the slices: one mapping for all sequences, or one for each; in the
                former, a list has a value for each sequence.
            advantages: Per token, or per sequence.
            rewards: Reward of each sequence, or any other score of it (a pass, a refusal, a length) within the
                contract's `assumptions.reward_range`; NaN where one is not known. With them `reward_drift` is measured.
            token_ids: Sampled tokens, so that the worst one can be named.
            inference_token_ids: Tokens that the inference side scored; where they differ the sequence is invalid.
            kept: Log of each kernel's mass on the tokens that top-p, top-k or min-p kept, nats, per token, as
                (training, inference), if log-probabilities are from before truncation. Both kernels are then compared
                over the tokens that the sampler kept. None for a side that is already renormalised, such as vLLM's
                processed log-probabilities.
            processing: Temperature, top-p and the like of the training and the inference side, where known; batches
                where they differ are invalid, because that would measure the sampler and not the kernel.
            weights: Weight versions of the training and the inference kernel; if both are integers, the lag is
                measured. If an update arrived during sampling, the inference kernel's is the step of each token,
                shaped like the log-probabilities; or that of each sequence, [sequences].
            groups: Name of each sequence's prompt, any number or text: rollouts of one prompt share its drift and count
                together. Without any, each sequence counts by itself, as if it were independent of the others.
            group_size: Number of rollouts of each prompt, or [sequences] of each sequence's prompt: the recorder waits
                for those that come in later batches, and samples prompts instead of batches. Without it, a batch holds
                all rollouts of its prompts.
            prompt_ids: Prompt tokens of each sequence, without padding, instead of `groups`: equal tokens are one
                prompt.
            density: True for log-densities, such as those of actions or of diffusion steps (a step counts as a token):
                they may exceed 0. None for the contract's `assumptions.density`.
            links: Spans of the requests that sampled the batch; the current span becomes the parent.
            key: Key whose hash decides whether the batch is sampled; without one, sampling is random.
            presampled: Measure in any case, because the caller has sampled already.
        """
        for name, given in (("kept", kept), ("processing", processing), ("weights", weights)):
            if given is not None and not (isinstance(given, tuple | list) and len(given) == 2):
                self.drop(f"{name}-argument", f"{name}: {type(given).__name__} is not a pair (training, inference)")
                return
        train_kept, inference_kept = kept or (None, None)
        if (versions := self._versions(*(weights or (None, None)))) is None:
            return
        arrays = {
            "train": train_logprobs,
            "inference": inference_logprobs,
            "mask": mask,
            "advantages": advantages,
            "rewards": rewards,
            "token_ids": token_ids,
            "inference_token_ids": inference_token_ids,
            "train_kept": train_kept,
            "inference_kept": inference_kept,
            "versions": versions[2],
            "prompts": prompt_ids,
        }
        # Rollouts of a prompt that come in several batches are all measured, or none.
        by_prompt = (
            not presampled and key is None and group_size is not None and (groups is not None or prompt_ids is not None)
        )
        measurer = self._admitted(key, presampled or by_prompt)
        said = {"processing": processing, "weights": versions[:2], "group_size": group_size, "density": density}
        self._submit("sampled", measurer, arrays, attributes, links, groups=_own(groups), by_prompt=by_prompt, **said)

    def compare_logits(
        self,
        train_logits: Any,
        inference_logits: Any,
        *,
        mask: Any = None,
        token_ids: Any = None,
        attributes: Attributes = None,
        processing: tuple[Processing, Processing] | None = None,
        weights: tuple[Weights, Weights] | None = None,
        links: Sequence[trace.SpanContext] = (),
        key: Hashable = None,
        presampled: bool = False,
    ) -> None:
        """Compare the kernels' whole next-token distributions, [tokens, vocabulary] or [sequences, tokens, vocabulary].

        Tokens outside of a truncation (top-p, top-k) have a logit of -inf on both sides: both kernels are then compared
        over the kept tokens. Logits are copied like everything else: at 32k entries in float32 those of both kernels
        take 256 KiB a token, so sample, or raise `queue_bytes`. With `token_ids`, the tokens sampled at each position,
        the quantities of `compare` are measured as well. Other arguments are those of `compare`.
        """
        if (versions := self._versions(*(weights or (None, None)), per_token=False)) is None:
            return
        arrays = {"train": train_logits, "inference": inference_logits, "mask": mask, "targets": token_ids}
        said = {"processing": processing, "weights": versions[:2]}
        self._submit("logits", self._admitted(key, presampled), arrays, attributes, links, **said)

    def compare_operator(
        self,
        name: str,
        train_output: Any,
        inference_output: Any,
        *,
        mask: Any = None,
        attributes: Attributes = None,
        of_batches: bool = False,
        key: Hashable = None,
        presampled: bool = False,
    ) -> None:
        """Compare the outputs of one operator (an attention, a norm, a matrix product) for the same inputs.

        Every row, the last axis of an output, is one observation of the `operator_*` metrics. The outputs are measured
        on their device, in float64. Operators that no clause names are recorded as long as `max_series` leaves room.
        `attributes` are one mapping for all, or one for each member of the first axis; `key` and `presampled` are those
        of `compare`.

        Outputs are [..., features], NumPy or torch, of one shape and of floating dtypes that may differ. `mask` has the
        output's first axes, such as [sequences, tokens], True where a row counts. Units in the last place are
        those of the dtype of `inference_output`. With `of_batches` both outputs are of one kernel, computed first alone
        and then in a batch: `operator_batch_dependence` is recorded.
        """
        try:
            operator_name(name)
        except (TypeError, ValueError) as error:
            self.drop("operator-name", error)
            return
        arrays = {"train": train_output, "inference": inference_output, "mask": mask}
        measurer = self._admitted(key, presampled)
        self._submit("operator", measurer, arrays, attributes, operator=name, of_batches=of_batches)

    def compare_routes(
        self,
        train_routes: Any,
        inference_routes: Any,
        *,
        mask: Any = None,
        attributes: Attributes = None,
        key: Hashable = None,
        presampled: bool = False,
    ) -> None:
        """Compare which experts the kernels sent tokens to, in each layer of a mixture of experts.

        Each token and layer is one observation of `route_disagreement`: of the operator `router`, and of `router.0`,
        `router.1` and so on for single layers, those that clauses name first. Routes are ids of experts, integers
        [tokens, layers, k] or [sequences, tokens, layers, k], in any order, such as vLLM's `routed_experts`; negative
        where a token has none. Other arguments are those of `compare`.
        """
        arrays = {"train": train_routes, "inference": inference_routes, "mask": mask}
        self._submit("routes", self._admitted(key, presampled), arrays, attributes)

    def observe(self, metric: str, value: Any, *, attributes: Attributes = None) -> None:
        """Record an observation that the program itself makes of a runtime quantity, such as `weights_mismatch`.

        Args:
            metric: Key of a quantity of origin `runtime`, as a clause's `metric:` names it, or `score_norm`, the norm
                of tokens' scores that `assumptions.score_norm_max` bounds.
            value: The observation, or several, [n].
            attributes: Attributes that decide the slices: one mapping for all, or one for each.
        """
        if metric not in _OBSERVABLE:
            self.drop("unknown-metric", f"{metric!r} is not one of {', '.join(_OBSERVABLE)}")
            return
        self._submit("value", self._running(), {"value": value}, attributes, quantity=metric)

    def sampled(
        self,
        key: Hashable | list[Hashable] = None,
        *,
        token_ids: Any,
        logprobs: Any,
        kept: Any = None,
        mask: Any = None,
        prompt_ids: Any = None,
        attributes: Attributes = None,
        processing: Processing | None = None,
        weights: TokenWeights = None,
        group: Any = None,
        group_size: int | None = None,
        links: Sequence[trace.SpanContext] = (),
    ) -> None:
        """Record what the inference kernel sampled; it is compared when `scored` gets the same key.

        Args:
            key: Name of the sequence, or a list with one for each; None to name them by their prompt and tokens.
            token_ids: Sampled tokens; shapes as in `compare`.
            logprobs: log Q of these tokens, nats.
            kept: log of this kernel's mass on the tokens that truncation kept, as in `compare`.
            mask: True where a token counts.
            prompt_ids: Prompt of each sequence, without padding: it is part of the sequence's name, and identifies the
                prompt.
            attributes: Attributes that decide the slices; those of both sides count.
            processing: Temperature, top-p and the like; compared if both sides give it.
            weights: Weight version of the inference kernel, or the step of each token, as in `compare`.
            group: Name of the prompt that the sequences answer, or a list with one for each; None for `prompt_ids`.
                Either side may give it, and `group_size`.
            group_size: Number of rollouts of each prompt.
            links: Further spans that it belongs to; the current span becomes a link of the comparison.
        """
        arrays = {"token_ids": token_ids, "logprobs": logprobs, "kept": kept, "mask": mask, "prompts": prompt_ids}
        if (versions := self._versions(None, weights)) is not None:
            said = {"processing": processing, "weights": versions[1], "group_size": group_size}
            self._submit_side("sampled", key, group, arrays | {"versions": versions[2]}, attributes, links, **said)

    def scored(
        self,
        key: Hashable | list[Hashable] = None,
        *,
        token_ids: Any,
        logprobs: Any,
        kept: Any = None,
        mask: Any = None,
        prompt_ids: Any = None,
        advantages: Any = None,
        rewards: Any = None,
        attributes: Attributes = None,
        processing: Processing | None = None,
        weights: Weights = None,
        group: Any = None,
        group_size: int | None = None,
        links: Sequence[trace.SpanContext] = (),
    ) -> None:
        """Record the training kernel's scores of a sampled sequence; the counterpart of `sampled`."""
        arrays = {"token_ids": token_ids, "logprobs": logprobs, "kept": kept, "mask": mask, "prompts": prompt_ids}
        if (versions := self._versions(weights, None)) is not None:
            arrays |= {"advantages": advantages, "rewards": rewards}
            said = {"processing": processing, "weights": versions[0], "group_size": group_size}
            self._submit_side("scored", key, group, arrays, attributes, links, **said)

    def _submit_side(
        self,
        role: Role,
        key: Any,
        group: Any,
        arrays: Mapping[str, Tree],
        attributes: Attributes,
        links: Sequence[trace.SpanContext],
        **said: Any,
    ) -> None:
        # Sequences with keys of their own are sampled one by one where they are measured.
        measurer = self._admitted(key, presampled=key is None or isinstance(key, list))
        own = list(key) if isinstance(key, list) else key
        self._submit("side", measurer, arrays, attributes, links, role=role, key=own, groups=_own(group), **said)

    def _versions(self, train: Any, inference: Any, *, per_token: bool = True) -> tuple[Weights, Weights, Any] | None:
        """Weight versions of the two kernels, and those of each token; None, and counted, where they are none."""
        try:
            version, versions = split(inference) if per_token else (as_version(inference), None)
            return as_version(train), version, versions
        except ValueError as error:
            self.drop("weights-argument", error)
            return None

    def takes(self, key: Hashable) -> bool:
        """Return True if the key is in the sample, so that a caller can skip the work for others."""
        try:
            return self._sampler.takes(key)
        except Exception as error:  # noqa: BLE001 - the share may come from a user's function
            self.drop("sampling-failed", error)
            return False

    def drop(self, reason: str, why: object) -> None:
        """For instrumentation: count a comparison that could not be recorded; `why` is logged the first time."""
        if measurer := self._running():
            measurer.counters.dropped(reason, why)

    def refuse(
        self,
        reason: str,
        why: object,
        sequences: int = 1,
        *,
        attributes: Mapping[str, Scalar] | None = None,
        inference: Kernel | None = None,
    ) -> None:
        """Count sequences that the caller knows to be incomparable as invalid input; `why` is logged the first time.

        `attributes` of all of them decide the slices; without these every slice may lack them. `inference` is the
        kernel that sampled them, the current one if None.
        """
        if measurer := self._running():
            table, on = measurer.table, None
            if attributes is not None and (LENGTH in attributes or LENGTH not in table.asked):
                on = table.counted(table.of_batch(attributes, range(sequences), sequences))
            pair = KernelPair(self._pair.train, inference or self._pair.inference)
            measurer.counters.invalid(reason, sequences, pair, why, on)

    def quarantined(self, found: Quarantine) -> None:
        """Count the sequences that `quarantine` kept and removed, with their drift. Never raises.

        Drift metrics cover everything that was sampled, so give the whole batch to `compare`.
        """
        if measurer := self._running():
            before, after = found.before, found.after
            measurer.counters.rollouts("kept", after.sequences, after.tokens, after.tv_sum)
            sequences, tokens = before.sequences - after.sequences, before.tokens - after.tokens
            measurer.counters.rollouts("quarantined", sequences, tokens, max(before.tv_sum - after.tv_sum, 0.0))

    @property
    def inference_version(self) -> str:
        """Short fingerprint of the inference kernel that is recorded now, as verdicts and directives name it."""
        return self._pair.inference.fingerprint

    def rollout(self, *, train: Kernel | None = None, inference: Kernel | None = None) -> None:
        """Switch to another kernel version: later batches are recorded for the new pair."""
        with self._lock:
            self._pair = self._met(KernelPair(train or self._pair.train, inference or self._pair.inference))
            if self._measurer is not None:
                self._measurer.rollout(self._pair)

    def follow(
        self, directives: Directives, *, send_weights: Callable[..., object] | None = None, pause: int = 20
    ) -> GuidedLoop:
        """Carry out the evaluator's directives about the kernel version in use in a loop of your own.

        Everything is measured while a `sample-more` step fires. The result sends weights, keeps rollouts out of the
        loss and says when to stop.

        Args:
            directives: A `kc_otel.client.router.Router`.
            send_weights: Gives the inference kernel the trainer's weights. Without it nobody is asked whether to.
            pause: Steps between two calls of `send_weights` while the same reason lasts.

        Raises:
            ValueError: If `pause` is not 1 or more.
        """
        loop = GuidedLoop(self, directives, send_weights, pause)
        self._sampler.ask(lambda share: directives.sampling(self.contract.name, share, self.inference_version))
        return loop

    def scalars(self) -> dict[str, float]:
        """Verdicts as numbers for the trainer's own log, such as `wandb.log({**recorder.scalars()}, step=step)`.

        They are as recent as the last export; this call requests the next one without waiting for it. Empty without a
        `log`, and before the first verdict. Never raises.
        """
        measurer = self._running()
        if measurer is None or self.log is None:
            return {}
        measurer.request_export()
        try:
            return dict(self.log.scalars())
        except Exception as error:  # noqa: BLE001 - whatever a log of somebody else does
            measurer.counters.dropped("log-failed", error)
            return {}

    def force_flush(self, timeout: float = 10.0) -> bool:
        """Measure and export everything recorded; return True if that was done within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        drained = self._measurer is None or self._measurer.flush(timeout)
        return (self._loop is None or self._loop.force_flush(deadline - time.monotonic())) and drained

    def shutdown(self, timeout: float = 10.0) -> bool:
        """Measure and export everything recorded, then stop; return True if that was done within `timeout` seconds.

        Calling it again does nothing. It is called at the exit of the interpreter.
        """
        atexit.unregister(self.shutdown)
        with self._lock:
            first, self._stopped = not self._stopped, True
        if not first or self._measurer is None:
            return True
        deadline = time.monotonic() + timeout
        drained = self._measurer.close(timeout)
        return (self._loop is None or self._loop.shutdown(deadline - time.monotonic())) and drained

    def stats(self) -> RecorderStats:
        """Return the counts of sequences measured in this process, and of those that were not, by reason."""
        return RecorderStats() if self._measurer is None else self._measurer.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _submit(
        self,
        kind: Kind,
        measurer: Measurer | None,
        arrays: Mapping[str, Tree],
        attributes: Attributes,
        links: Sequence[trace.SpanContext] = (),
        **settings: Any,
    ) -> None:
        """Queue a batch where there is a measurer to take it."""
        if measurer is not None:
            origin = attributes, context.get_current(), links, time.time_ns()
            measurer.submit(QueuedBatch(kind, self._pair, arrays, settings, *origin))

    def _admitted(self, key: Any, presampled: bool) -> Measurer | None:
        """The measurer, if there is one and what has this key is in its sample."""
        measurer = self._running()
        if measurer is None or presampled:
            return measurer
        try:
            if self._sampler.takes(key):
                return measurer
        except Exception as error:  # noqa: BLE001 - the share may come from a user's function
            measurer.counters.dropped("sampling-failed", error)
        else:
            measurer.counters.count(unsampled=1)
        return None

    def _running(self) -> Measurer | None:
        """Return this process's measurer, started if necessary; None if recording is off. Never raises."""
        if self._measurer is None and not self._stopped:
            with self._lock:
                if self._measurer is None and not self._stopped:
                    try:
                        self._start()
                    except Exception:  # noqa: BLE001 - the program must run, watched or not
                        _log.exception("contract %s: recording could not be started and is off", self.contract.name)
                        self._stopped = True
        return self._measurer

    def _start(self) -> None:
        measurer = self._make_measurer(self._pair)
        self._loop = self._export_loop(measurer)
        if self._loop is not None:
            measurer.request_export = self._loop.request
        self._measurer = measurer

    def _export_loop(self, measurer: Measurer) -> ExportLoop | None:
        # In front of the others, which are foreign and may fail.
        watching = () if self.log is None else tuple(self.log.attach(self.contract))
        given = None if self._metric_exporter is None else (self._metric_exporter,)
        if not watching and given is None and not environment.exporter_names():
            return None
        same = (other for other in _alive if other.contract.name == self.contract.name)
        taken = {other._instance for other in same if other is self or not other._stopped}  # noqa: SLF001
        resource = environment.process_resource(taken, self._resource)
        self._instance = str(resource.attributes[SERVICE_INSTANCE_ID])
        return ExportLoop(
            measurer,
            exporters=lambda: (*watching, *(given or environment.metric_exporters(measurer.counters.export_rejected))),
            resource=resource,
            interval=self._interval,
            timeout=environment.export_timeout(),
            scope=scope_of(self.contract, measurer.table.over),
        )

    def _met(self, pair: KernelPair) -> KernelPair:
        """Say of a kernel that is new here where it is not what the contract declares."""
        kernels = self.contract.kernels
        for kernel, spec in ((pair.train, kernels.train), (pair.inference, kernels.inference)):
            if kernel not in self._known:
                self._known.add(kernel)
                kernel.log_otherwise(self.contract.name, spec, _log)
        return pair

    def _begin(self) -> None:
        self._measurer = self._loop = None
        self._lock = threading.Lock()


def _own(groups: Any) -> Any:
    """Names of prompts that the caller cannot change any more: one for all, a list, or a tensor where they are."""
    if is_tensor(groups):
        return groups.detach().clone()
    return list(groups) if isinstance(groups, list | tuple | np.ndarray) else groups
