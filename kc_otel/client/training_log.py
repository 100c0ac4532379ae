"""Verdicts in the trainer's own log: a contract's clauses as scalars by step, beside reward and KL."""

from __future__ import annotations

import http.client
import logging
import math
import os
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from kc_otel.client.credentials import authorization, client_context, parts_of
from kc_otel.client.poll import lateness
from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import read_json_text
from kc_otel.contract.slices import ALL
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.plain_json import read_plain
from kc_otel.judge.verdict import Causes, Cell, Part, Status, Verdict

__all__ = ["TrainingLog", "scalars"]

_log: Final = logging.getLogger("kc_otel")
_MAX_RESPONSE_BYTES: Final = 64 << 20
_TIMEOUT_SECONDS: Final = 10.0
_NUMBERS: Final = {"estimate", "lower", "upper", "evidence"}


class TrainingLog:
    """Source of `Recorder.scalars`: a contract's verdicts on this run.

    >>> from kc_otel.record.recorder import Recorder
    >>> recorder = Recorder("contracts/rl-rollouts-bf16-fp8.yaml", log=TrainingLog())
    >>> recorder.scalars()                                  # nothing has been measured yet
    {}
    >>> recorder.shutdown()
    True

    Without an evaluator, this process judges its own exports, on the export thread and with the evaluator's code: the
    same windows, intervals and evidence. In a distributed run, these verdicts cover only the data of this process. If
    several processes report to one evaluator, name it, and the log has its verdicts about all of them.

    Args:
        evaluator: Base URL of the API of an evaluator that judges; None to judge in this process.
        refresh: Seconds between two requests to it.
        token_file: File with the token that the evaluator requires; None for the file in KC_OTEL_TOKEN_FILE, or the
            token in KC_OTEL_TOKEN.

    Raises:
        ValueError: If the URL is not valid.
    """

    def __init__(
        self, evaluator: str | None = None, *, refresh: float = 5.0, token_file: str | os.PathLike[str] | None = None
    ) -> None:
        if evaluator is not None:
            parts_of(evaluator)
        self._evaluator = evaluator
        self._refresh = refresh
        self._token_file = token_file
        self._scalars: Mapping[str, float] = {}

    def attach(self, contract: Contract) -> Sequence[MetricExporter]:
        """Start the log for a contract; the recorder calls this in each process that records."""
        self._scalars = {}
        if self._evaluator is None:
            return (_InProcess(contract, self),)
        url = f"{self._evaluator.rstrip('/')}/api/v1/verdicts?contract={quote(contract.name)}"
        return (_Asking(url, self, self._refresh, self._token_file),)

    def scalars(self) -> Mapping[str, float]:
        """Return the scalars of the newest verdicts; empty before the first and while the evaluator does not answer."""
        return self._scalars

    def take(self, verdicts: Sequence[Verdict], causes: Mapping[Cell, Causes] | None = None) -> None:
        """Make these verdicts the newest."""
        self._scalars = scalars(verdicts, causes or {})


class SilentExporter(MetricExporter):
    """Exporter that sends nothing."""

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any) -> MetricExportResult:  # noqa: ARG002 - the interface's
        """Accept the export without sending it."""
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:  # noqa: ARG002 - the interface's
        """Nothing waits."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        """Nothing to close."""


class _InProcess(SilentExporter):
    """An exporter that judges each export; its errors do not reach the exporters beside it."""

    def __init__(self, contract: Contract, log: TrainingLog) -> None:
        super().__init__()
        self._name = contract.name
        self._judge = Evaluator([contract])
        self._judge.listening(time.time())
        self._log = log
        self._failed = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any) -> MetricExportResult:  # noqa: ARG002 - the interface's
        """Judge the export."""
        try:
            now = time.time()
            self._judge.ingest_metrics(encode_metrics(metrics_data), now)
            judged = self._judge.evaluate(now)[self._name]
            self._log.take(judged.verdicts, judged.causes)
        except Exception:  # noqa: BLE001 - the run must go on, judged or not
            self._log.take(())
            if not self._failed:
                self._failed = True
                _log.exception("contract %s: the training log has no verdicts", self._name)
        return MetricExportResult.SUCCESS


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect handler that follows none, so that the token reaches no other host."""

    def redirect_request(self, *_: Any) -> None:
        """Make a redirect an error."""


class _Asking(SilentExporter):
    """A thread that polls an evaluator until the recorder is shut down."""

    def __init__(self, url: str, log: TrainingLog, refresh: float, token_file: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self._url = url
        self._log = log
        self._refresh = refresh
        self._token_file = token_file
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="kc-otel-training-log", daemon=True).start()

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:  # noqa: ARG002 - the interface's
        """Ask no more."""
        self._stopped.set()

    def _run(self) -> None:
        reachable = True
        while not self._stopped.is_set():
            try:
                self._log.take(*self._asked())
            except (OSError, ValueError, http.client.HTTPException) as error:
                if reachable:
                    _log.warning("no verdicts for the training log from %s: %s", self._url, error)
                reachable = False
                self._log.take(())  # old verdicts at new steps would say that they still hold
            else:
                reachable = True
            self._stopped.wait(self._refresh)

    def _asked(self) -> tuple[list[Verdict], dict[Cell, Causes]]:
        request = urllib.request.Request(self._url, headers=authorization(self._token_file))  # noqa: S310 - http or https
        handlers = [urllib.request.HTTPSHandler(context=client_context())] if self._url.startswith("https:") else []
        with urllib.request.build_opener(_NoRedirects, *handlers).open(request, timeout=_TIMEOUT_SECONDS) as answer:
            if late := lateness(answer.headers):
                raise ValueError(late)
            raw = answer.read(_MAX_RESPONSE_BYTES + 1)
        if len(raw) > _MAX_RESPONSE_BYTES:
            raise ValueError(f"the answer is larger than {_MAX_RESPONSE_BYTES} bytes")
        try:
            plain = _with_nan([row for row in read_json_text(raw)["verdicts"] if not row["gone"]])
            cells = [{name: row[name] for name in Cell._fields} for row in plain]
            verdicts = [read_plain(Verdict, {**row, "cell": cell}) for row, cell in zip(plain, cells, strict=True)]
            causes = {made.cell: read_plain(Causes, row["causes"]) for made, row in zip(verdicts, plain, strict=True)
                      if row.get("causes")}  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"the answer holds no verdicts ({error!r})") from None
        return verdicts, causes


def scalars(verdicts: Sequence[Verdict], causes: Mapping[Cell, Causes] = MappingProxyType({})) -> dict[str, float]:
    """Return a contract's verdicts for a trainer's log: finite numbers by name.

    For each clause, `kc/CLAUSE/verdict`: the worst of all its cells, also of those without numbers: 0 PASS,
    1 INCONCLUSIVE, 2 NO_DATA, 3 FAIL, 4 INVALID_INPUT.

    For each clause with data, on its worst slice with data (the worst verdict, then the smallest margin in relation to
    the limit; `all` only where its verdict is worse than that of every slice):

    - `kc/CLAUSE/worst/SLICE`: the estimate there. Only the slice that is the worst now has such a number, so that the
      lines of a chart of `kc/CLAUSE/worst/*` show which one was the worst at each time.
    - `kc/CLAUSE/bound`: the confidence bound that decides there: the lower one on FAIL, else the upper.
    - `kc/CLAUSE/limit`: the limit for that bound.
    - `kc/CLAUSE/evidence`: evidence against the limit, 0 to 1, for clauses that have it.
    - `kc/CLAUSE/all`: the estimate over all traffic.
    - `kc/CLAUSE/kernel`, `kc/CLAUSE/staleness`, `kc/CLAUSE/total`, where older weights sampled some of it: the kernels'
      drift, what the age of the weights adds, and both; each with `/lower` and `/upper`, and likewise
      `kc/CLAUSE/lag/0` to `kc/CLAUSE/lag/8+` for each lag. `kc/CLAUSE/stale` is the share of what older weights
      sampled.

    And for all of them `kc/failing`, the number of cells that FAIL; absent while no clause has data.

    Args:
        verdicts: Of every cell of one contract, as of one evaluation.
        causes: Split of its means by cause.
    """
    judged: dict[str, list[Verdict]] = {}
    found: dict[str, float] = {}
    for verdict in verdicts:
        name = f"kc/{verdict.cell.clause}/verdict"
        found[name] = max(found.get(name, 0.0), float(verdict.status.code))
        if verdict.status not in {Status.NO_DATA, Status.INVALID_INPUT}:
            judged.setdefault(verdict.cell.clause, []).append(verdict)
    for clause, cells in judged.items():
        worst = max(cells, key=_badness)
        overall = [cell for cell in cells if cell.cell.slice == ALL]
        of_clause = {
            f"worst/{worst.cell.slice}": worst.estimate,
            "bound": worst.lower if worst.status is Status.FAIL else worst.upper,
            "limit": worst.limit,
            "evidence": worst.evidence,
            "all": max(overall, key=_badness).estimate if overall else math.nan,
        }
        found |= {f"kc/{clause}/{name}": value for name, value in of_clause.items() if math.isfinite(value)}
    for of in {of.clause: of for of in causes.values()}.values():
        found[f"kc/{of.clause}/stale"] = of.share
        parts: dict[str, Part] = {"kernel": of.kernel, "staleness": of.staleness, "total": of.total}
        for name, part in (parts | {f"lag/{of_lag.lag}": of_lag for of_lag in of.by_lag}).items():
            numbers = {"": part.estimate, "/lower": part.lower, "/upper": part.upper}
            found |= {f"kc/{of.clause}/{name}{end}": value for end, value in numbers.items() if math.isfinite(value)}
    if judged:
        found["kc/failing"] = float(sum(verdict.status is Status.FAIL for verdict in verdicts))
    return found


def _badness(verdict: Verdict) -> tuple[int, bool, float]:
    """Return a sort key: greater is worse, a slice before all traffic."""
    margin = verdict.margin / (abs(verdict.limit) or 1.0)
    return verdict.status.code, verdict.cell.slice != ALL, -margin if math.isfinite(margin) else math.inf


def _with_nan(plain: Any) -> Any:
    """The API's answer, with NaN in the place of null, which stands for a number that is not finite."""
    if isinstance(plain, list):
        return [_with_nan(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    return {name: math.nan if value is None and name in _NUMBERS else _with_nan(value) for name, value in plain.items()}
