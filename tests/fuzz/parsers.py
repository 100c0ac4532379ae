"""Every parser of what others wrote, as a function of bytes that raises nothing or what it documents, with seeds.

`tests/fuzz/test_parsers.py` runs them with Hypothesis, `python -m tests.fuzz NAME SECONDS` with Atheris.
"""

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
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


def otlp_protobuf(body: bytes) -> None:
    evaluator = Evaluator([make_contract()])
    try:
        evaluator.ingest_metrics(from_protobuf(body, _LIMITS), NOW)
    except ReceiveError:
        return
    evaluator.evaluate(NOW)


def otlp_json(body: bytes) -> None:
    evaluator = Evaluator([make_contract()])
    try:
        evaluator.ingest_metrics(from_json(body, _LIMITS), NOW)
    except ReceiveError:
        return
    evaluator.evaluate(NOW)


def compressed(body: bytes) -> None:
    for encoding in ("gzip", "deflate"):
        try:
            assert len(inflate(body, encoding, _LIMITS)) <= _LIMITS.max_bytes
        except ReceiveError:
            continue


def contract(body: bytes) -> None:
    try:
        load_text(body.decode(errors="replace"))
    except ContractError:
        return


def access(body: bytes) -> None:
    try:
        AccessFile(_file(body))
    except UnusableFileError:
        return


def recording_jsonl(body: bytes) -> None:
    _recording(_file(body, "file.jsonl"))


def recording_npz(body: bytes) -> None:
    _recording(_file(body, "file.npz"))


def _recording(path: Path) -> None:
    try:
        load_recording(path)
    except ValueError:
        return


def traffic(body: bytes) -> None:
    try:
        for entry in read_recordings([_file(body, "file.otlp")], []):
            entry.read()
    except TrafficFileError:
        return


def people(body: bytes) -> None:
    for shape in _REQUESTS:
        try:
            TypeAdapter(shape).validate_json(body)
        except ValidationError:
            continue


def webhook(body: bytes) -> None:
    try:
        parsed_body(body)
    except VerificationError:
        return


def routing_table(body: bytes) -> None:
    """The decision table, as a router gets it from an evaluator, or from the file that it keeps."""
    try:
        TableFile(_file(body, "table.json")).load()
    except ValueError:
        return


def evidence(body: bytes) -> None:
    record = _json(body)
    try:
        verify_evidence(record)
    except EvidenceError:
        return


def endpoint_answers(body: bytes) -> None:
    answer = _json(body)
    for read in (lambda: sampled(answer, [1, 2]), lambda: scored(answer, [1], [2]), lambda: tokenized(answer)):
        try:
            read()
        except ValueError:
            continue


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


PARSERS: dict[str, Callable[[bytes], None]] = {
    parser.__name__.replace("_", "-"): parser
    for parser in (
        otlp_protobuf, otlp_json, compressed, contract, access, recording_jsonl, recording_npz, traffic,
        people, webhook, routing_table, evidence, endpoint_answers,
    )
}  # fmt: skip


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
