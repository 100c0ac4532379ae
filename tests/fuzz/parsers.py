"""Every parser of what others wrote, as a function of bytes that raises nothing or what it documents, with seeds.

`tests/fuzz/test_parsers.py` runs them with Hypothesis, `python -m tests.fuzz NAME SECONDS` with Atheris.
"""

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from pydantic import BaseModel, TypeAdapter, ValidationError

from kc_otel.client.router import TableFile
from kc_otel.client.webhooks import VerificationError, parsed_body
from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load_text
from kc_otel.judge.decisions import DecisionTable
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.requests import Limits, ReceiveError, from_json, from_protobuf, inflate
from kc_otel.judge.promotion.gate_evidence import EvidenceError
from kc_otel.offline.gate.evidence import verify_evidence
from kc_otel.offline.replay import TrafficFileError, read_recordings
from kc_otel.recordings.endpoints.protocol import sampled, scored, tokenized
from kc_otel.recordings.recording_files import load_recording
from kc_otel.serve.access.access_file import AccessFile
from kc_otel.serve.api.routes_decisions import AlertsRequest, OrderRequest, PinRequest, SilenceRequest, SliceRequest
from kc_otel.serve.watched_files import UnusableFileError
from tests.judge.conftest import NOW, Sender, make_contract

__all__ = ["PARSERS", "SEEDS"]

_LIMITS = Limits(max_bytes=1 << 16)
_REQUESTS: tuple[type[BaseModel], ...] = (AlertsRequest, PinRequest, SilenceRequest, SliceRequest, OrderRequest)


def _file(content: bytes, name: str = "file") -> Path:
    """A file in memory's own file system where there is one; the same one every time."""
    folder = Path(tempfile.gettempdir()) / f"kc-otel-fuzz-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def _judged(request: ExportMetricsServiceRequest) -> None:
    evaluator = Evaluator([make_contract()])
    evaluator.ingest_metrics(request, NOW)
    evaluator.evaluate(NOW)


def _inflated(body: bytes, encoding: str) -> None:
    assert len(inflate(body, encoding, _LIMITS)) <= _LIMITS.max_bytes


def _traffic(body: bytes) -> None:
    for entry in read_recordings([_file(body, "file.otlp")], []):
        entry.read()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _parser(refusal: type[Exception], *reads: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """Reads bytes in each of these ways, any of which may refuse them with this error."""

    def parse(body: bytes) -> None:
        for read in reads:
            with suppress(refusal):
                read(body)

    return parse


PARSERS: dict[str, Callable[[bytes], None]] = {
    "otlp-protobuf": _parser(ReceiveError, lambda body: _judged(from_protobuf(body, _LIMITS))),
    "otlp-json": _parser(ReceiveError, lambda body: _judged(from_json(body, _LIMITS))),
    "compressed": _parser(ReceiveError, *(partial(_inflated, encoding=encoding) for encoding in ("gzip", "deflate"))),
    "contract": _parser(ContractError, lambda body: load_text(body.decode(errors="replace"))),
    "access": _parser(UnusableFileError, lambda body: AccessFile(_file(body))),
    "recording-jsonl": _parser(ValueError, lambda body: load_recording(_file(body, "file.jsonl"))),
    "recording-npz": _parser(ValueError, lambda body: load_recording(_file(body, "file.npz"))),
    "traffic": _parser(TrafficFileError, _traffic),
    "people": _parser(ValidationError, *(TypeAdapter(shape).validate_json for shape in _REQUESTS)),
    "webhook": _parser(VerificationError, parsed_body),
    # As a router gets it from an evaluator, or from the file that it keeps.
    "routing-table": _parser(ValueError, lambda body: TableFile(_file(body, "table.json")).load()),
    "evidence": _parser(EvidenceError, lambda body: verify_evidence(_json(body))),
    "endpoint-answers": _parser(
        ValueError,
        lambda body: sampled(_json(body), [1, 2]),
        lambda body: scored(_json(body), [1], [2]),
        lambda body: tokenized(_json(body)),
    ),
}


def _seeds() -> dict[str, list[bytes]]:
    import io

    import numpy as np
    from google.protobuf import json_format

    metrics = Sender().request(NOW, [0.5, -0.25])
    archive = io.BytesIO()
    np.savez(archive, train_logprobs=np.zeros((2, 3)), inference_logprobs=np.zeros((2, 3)))
    row = {"train_logprobs": [-1.0, -2.0], "inference_logprobs": [-1.0, -2.5], "token_ids": [1, 2]}
    order = {"contract": "policy", "slice": "code", "kernel": "train-kernel", "until": 9e9, "by": "ada", "why": "so"}
    choice = {
        "token_ids": [5],
        "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-1.0]},
        "prompt_token_ids": [1, 2],
    }
    return {
        "otlp-protobuf": [metrics.SerializeToString()],
        "otlp-json": [json_format.MessageToJson(metrics).encode()],
        "compressed": [gzip.compress(b"x" * 100_000), gzip.compress(b"")],
        "contract": [yaml.safe_dump(make_contract().model_dump(mode="json", by_alias=True)).encode()],
        "access": [yaml.safe_dump({"tokens": [{"name": "n", "may": ["send"], "sha256": "0" * 64}]}).encode()],
        "recording-jsonl": [json.dumps(row).encode() + b"\n"],
        "recording-npz": [archive.getvalue()],
        "traffic": [len(metrics.SerializeToString()).to_bytes(4, "big") + metrics.SerializeToString()],
        "people": [json.dumps(order).encode()],
        "webhook": [b'{"status": "firing", "alerts": []}'],
        "routing-table": [TypeAdapter(DecisionTable).dump_json(DecisionTable(3))],
        "evidence": [b'{"format": "kernel-contract-evidence/v1"}'],
        "endpoint-answers": [json.dumps({"choices": [choice], "tokens": [1, 2]}).encode()],
    }


SEEDS = _seeds()
