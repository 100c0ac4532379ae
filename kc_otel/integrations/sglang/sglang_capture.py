"""Requests of one SGLang front end, from their dispatch to the scheduler until their last token returns.

The message to the scheduler asks for the log-probability of the sampled token, but the front end's state of the request
does not, so responses do not change. Source: sglang 0.5.23, srt/managers/tokenizer_manager.py (`_send_one_request`,
`_handle_batch_output`), srt/managers/io_struct.py (`TokenizedGenerateReqInput`, and per request of `BatchStrOutput` and
`BatchTokenIDOutput`: `output_token_logprobs_val` and `_idx`, `output_token_sampling_mask`, `weight_versions`),
srt/layers/sampler.py: log-probabilities are from after penalties and temperature and before top-p, top-k and min-p, or
from before temperature with SGLANG_RETURN_ORIGINAL_LOGPROB; those that come with a sampling mask are over the tokens
that were kept.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from kc_otel.integrations.vllm.delivery import NOT_SCORABLE, CaptureStats, Completion, RequestDelivery
from kc_otel.integrations.vllm.settings import Settings
from kc_otel.record.kernel import Kernel, parallelism_of
from kc_otel.recordings.request import KeptTokens

_log = logging.getLogger("kc_otel")
_MAX_UNDER_WAY: Final = 65_536  # requests under way that are followed; those that never came back are forgotten first
_ALL_TOKENS: Final = 1 << 30  # value that SGLang stores for top_k -1
_TRUNCATION: Final = ("top_p", "top_k", "min_p")
_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_RESTRICTIONS: Final = ("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "watermark")
_ORIGINAL: Final = "SGLANG_RETURN_ORIGINAL_LOGPROB"


@dataclass(slots=True, eq=False)
class SentRequest:
    """Data collected of one request, of which `request` is what was known when it was sent."""

    request: Completion
    masked: bool = False
    of_support: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Sequence[int]] = field(default_factory=list)

    @property
    def logprobs_mode(self) -> str:
        """`raw` where something was done to the distribution after the log-probabilities were taken."""
        if os.environ.get(_ORIGINAL, "").lower() in {"true", "1", "yes", "y", "on"}:
            return "raw"
        params = self.request.params
        whole = params.top_p == 1.0 and params.top_k in (0, -1) and params.min_p == 0.0
        return "processed" if whole or self.masked else "raw"

    def completion(self) -> Completion:
        """The completion."""
        kept = None
        if self.masked and self.kept:
            counts = np.array([len(ids) for ids in self.kept], dtype=np.int64)
            kept = KeptTokens(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in self.kept]), counts)
        return replace(self.request, token_ids=self.token_ids, logprobs=self.logprobs, kept=kept)


class SglangCapture:
    """Follows a share of the requests of a process, by hooks on the front end's event loop.

    Its settings are asked for at the first request, in the process that serves.
    """

    def __init__(self, settings: Callable[[], Settings | None]) -> None:
        self._settings = settings
        self._delivery: RequestDelivery | None = None
        self._kernel: Future[Kernel] = Future()
        self._lock = threading.Lock()
        self._under_way: OrderedDict[str, SentRequest] = OrderedDict()
        self._refused = False

    def stats(self) -> CaptureStats:
        """Outcomes of the requests of this process."""
        return CaptureStats() if self._delivery is None else self._delivery.stats()

    def flush(self, timeout: float = 10.0) -> bool:
        """Give every finished request to the sink."""
        return self._delivery is None or self._delivery.flush(timeout)

    def failed(self, error: Exception) -> None:
        """Count a fault of ours."""
        if self._delivery is not None:
            self._delivery.drop("failed", error)
        elif not self._refused:
            self._refused = True
            _log.error("kc-otel: SGLang is not instrumented: %s", error)

    def sent_together(self, manager: Any, tokenized: Any) -> None:
        """Note requests that go to the scheduler in one message."""
        for request in tokenized:
            self.sent(manager, request)

    def sent(self, manager: Any, tokenized: Any) -> None:
        """Note a request that goes to the scheduler."""
        given = getattr(tokenized, "sampling_params", None)
        # An embedding, or the warming of a common prefix.
        if self._refused or given is None or given.max_new_tokens == 0:
            return
        delivery = self._start(manager)
        if not delivery.takes(tokenized.rid, "" if _supported(tokenized) else NOT_SCORABLE):
            return
        tokenized.return_logprob = True
        sent = Completion(
            tokenized.rid,
            tokenized.rid,
            list(tokenized.input_ids),
            (),
            (),
            _params(given),
            model=str(getattr(manager.server_args, "served_model_name", "") or ""),
            traceparent=str((getattr(tokenized, "external_trace_header", None) or {}).get("traceparent", "")),
        )
        masked = bool(getattr(tokenized, "return_sampling_mask", False))
        of_support = getattr(tokenized, "sampling_logprobs_mode", "") == "support"
        self._under_way[tokenized.rid] = SentRequest(sent, masked, of_support)
        if len(self._under_way) > _MAX_UNDER_WAY:
            self._under_way.popitem(last=False)
            delivery.drop("aborted", "the engine did not finish it")

    def received(self, manager: Any, output: Any) -> None:
        """Take tokens that come back from the scheduler."""
        if not self._under_way or self._delivery is None:
            return
        for index, request_id in enumerate(output.rids):
            sent = self._under_way.get(request_id)
            if sent is None:
                continue
            _take(sent, output, index)
            if output.finished_reasons[index] is not None:
                del self._under_way[request_id]
                self._finish(self._delivery, sent, manager, output, index)

    def _finish(self, delivery: RequestDelivery, sent: SentRequest, manager: Any, output: Any, index: int) -> None:
        reason = output.finished_reasons[index]
        why = str(reason.get("type", "") if isinstance(reason, Mapping) else reason)
        if why == "abort":
            delivery.drop("aborted", "the engine did not finish it")
            return
        version, spans = _asked(manager, "weight_version"), _of(output, "weight_versions", index)
        versions = [(str(span.version), int(span.start)) for span in spans or ()] or [(str(version), 0)] * bool(version)
        sent.request = replace(sent.request, finish_reason=why, weight_versions=versions, at=time.time_ns())
        numbers = len(sent.request.prompt_ids) + 2 * len(sent.token_ids) + sum(map(len, sent.kept))
        delivery.submit(sent.completion, self._kernel, sent.logprobs_mode, numbers)

    def _start(self, manager: Any) -> RequestDelivery:
        with self._lock:
            if self._delivery is None:
                settings = self._settings()
                if settings is None:
                    raise ValueError("the environment names no contract any more")
                self._kernel.set_result(_kernel_of(manager.server_args))
                self._delivery = RequestDelivery(settings.sink, settings.attributes, settings.sampler)
            return self._delivery


def _supported(tokenized: Any) -> bool:
    """Return True if a request is one completion of a prompt of tokens, which can be scored again from its ids."""
    foreign = ("input_embeds", "mm_inputs", "session_params", "positional_embed_overrides", "custom_logit_processor")
    beams = getattr(tokenized.sampling_params, "beam_width", None)
    return bool(tokenized.input_ids) and not beams and not any(getattr(tokenized, name, None) for name in foreign)


def _params(given: Any) -> Any:
    """SGLang's sampling parameters by the names that `request_of` knows."""
    top_k = -1 if given.top_k >= _ALL_TOKENS else given.top_k
    found = {name: getattr(given, name) for name in (*_TRUNCATION, *_PENALTIES)}
    found |= {"temperature": 0.0 if top_k == 1 else given.temperature, "top_k": top_k}
    restricted = {name: True for name in _RESTRICTIONS if getattr(given, name, None)}
    if restricted:
        found["structured_outputs"] = True
    extra = getattr(given, "custom_params", None)
    return SimpleNamespace(**found, min_tokens=given.min_new_tokens, extra_args=dict(extra or {}))


def _take(sent: SentRequest, output: Any, index: int) -> None:
    """Take the tokens of one or more steps of a request."""
    ids, values = _of(output, "output_token_logprobs_idx", index), _of(output, "output_token_logprobs_val", index)
    if ids:
        sent.token_ids += [int(token) for token in ids]
    if sent.masked:
        chunk = _of(output, "output_token_sampling_mask", index)
        if chunk is not None:
            masks, logprobs = chunk.to_lists(support_logprobs=sent.of_support)
            if sent.of_support:  # of every kept token
                rows = zip(ids or (), masks, logprobs, strict=True)
                logprobs = [row[mask.index(token)] for token, mask, row in rows]
            sent.kept += masks
            sent.logprobs += logprobs
    elif values:
        sent.logprobs += values


def _of(output: Any, name: str, index: int) -> Any:
    """Return a request's item of an output's list; None if there is no list."""
    every = getattr(output, name, None)
    return every[index] if every else None


def _asked(manager: Any, name: str) -> Any:
    ask = getattr(manager, "config_value", None)
    return ask(name) if ask is not None else getattr(manager.server_args, name, None)


def _kernel_of(given: Any) -> Kernel:
    """The kernel version of an engine, from its arguments."""
    from sglang.version import __version__ as version  # noqa: PLC0415 - only where SGLang runs

    named = ("rl_on_policy_target", "speculative_algorithm", "moe_runner_backend", "fp8_gemm_runner_backend")
    extra: dict[str, Any] = {name: str(value) for name in named if (value := getattr(given, name, None))}
    if getattr(given, "enable_deterministic_inference", False):
        extra["deterministic"] = "true"
    return Kernel(
        "sglang",
        version=str(version),
        dtype=str(getattr(given, "dtype", "") or ""),
        quantization=getattr(given, "quantization", None),
        kv_cache_dtype=str(getattr(given, "kv_cache_dtype", "") or ""),
        attention=str(getattr(given, "attention_backend", "") or ""),
        parallelism=parallelism_of(given, tp="tp_size", pp="pp_size", dp="dp_size", ep="ep_size"),
        compile="eager" if getattr(given, "disable_cuda_graph", False) else "graphs",
        extra=extra,
    )
