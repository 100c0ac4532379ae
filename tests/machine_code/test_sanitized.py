"""The loops in C under AddressSanitizer and UndefinedBehaviorSanitizer: they touch no byte that is not theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kc_otel.machine_code import hatch_build

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-fno-omit-frame-pointer")
PROGRAM = """
import random, sys
from pathlib import Path
import numpy as np
from google.protobuf.internal.encoder import _VarintBytes
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from kc_otel import machine_code
machine_code._LIBRARY = Path(sys.argv[1])
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.wire_columns import read_columns
from tests.judge.conftest import NOW, Sender, make_contract, merge

assert machine_code.is_available()
chance, rng = random.Random(1), np.random.default_rng(1)

def damaged(body):
    made = bytearray(body)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        at = chance.randrange(len(made))
        what = chance.random()
        if what < 0.5:
            made[at] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        elif what < 0.7:
            del made[at : at + chance.choice([1, 1, 8, 200])]
        elif what < 0.9:
            made[at:at] = bytes(chance.choice([0x80, 0xFF, 0x0A, 0x12]) for _ in range(chance.choice([1, 9, 12, 70])))
        else:
            made[at:] = made[at : at + chance.randrange(60)]
        if not made:
            return body
    return bytes(made)

def wrapped(content, fields):
    for field in fields:  # from inside out
        content = bytes((field << 3 | 2,)) + _VarintBytes(len(content)) + content
    return content

RESOURCE, SCOPE, METRIC, POINT, SIDE = (1,), (2, 1), (2, 2, 1), (1, 10, 2, 2, 1), (8, 1, 10, 2, 2, 1)

def deep(whole):
    # What is inside is damaged, and the lengths of what is around it are right.
    inside = ExportMetricsServiceRequest.FromString(whole).resource_metrics[0]
    scope = inside.scope_metrics[0]
    point = scope.metrics[0].exponential_histogram.data_points[0]
    parts = ((inside, RESOURCE), (scope, SCOPE), (scope.metrics[0], METRIC), (point, POINT), (point.positive, SIDE))
    for part, fields in parts:
        yield wrapped(damaged(part.SerializeToString()), fields)
    said = point.SerializeToString()
    yield wrapped(said[: chance.randrange(len(said))], POINT)
    yield wrapped(wrapped(b"", (1,)) * chance.choice([10, 9000]), (10, 2, 2, 1))  # empty points
    yield wrapped(wrapped(b"", (5, 2)) * chance.choice([10, 9000]), (2, 1))  # empty gauges

def odd(whole):
    # A message of known streams, with sides that nobody has.
    request = ExportMetricsServiceRequest.FromString(whole)
    for inside in request.resource_metrics:
        side = inside.scope_metrics[0].metrics[0].exponential_histogram.data_points[0].positive
        side.offset += chance.choice([0, 0, -300, -5, 5, 300, 2**30 - 1000, -(2**30)])
        side.bucket_counts[chance.randrange(len(side.bucket_counts))] = chance.choice([0, 2**21, 2**56, 2**63])
        side.bucket_counts.extend([chance.choice([0, 2**35])] * chance.choice([0, 1, 8, 100, 400]))
    return request.SerializeToString()

read = folded = 0
for turn in range(int(sys.argv[2])):
    evaluator = Evaluator([make_contract()])
    senders = [Sender(slice=slice, instance=str(n)) for n, slice in enumerate(("all", "code", "all", "code"))]
    for step in range(12):
        now = NOW + 10.0 * step
        wide = 0.5 if step < 9 else chance.choice([1.2, 2.0, 20.0])
        values = rng.lognormal(-2.0, wide, 200) * rng.choice([1.0, -1.0, 0.0], 200)
        parts = [sender.request(now, values * 1000.0**n) for n, sender in enumerate(senders)]  # far apart
        whole = merge(*parts).SerializeToString()
        for _ in range(30):
            read += read_columns(damaged(whole)) is not None
        for _ in range(10):
            for body in deep(whole):
                read += read_columns(body, chance.choice([1, 20, 60_000])) is not None
        body = whole if step < 3 or step % 2 else chance.choice([damaged, odd])(whole)
        columns = evaluator.columns_of(body, 60_000)
        if columns is not None:
            evaluator.ingest_metrics(columns, now)
            folded += int(columns.taken.sum())
    evaluator.evaluate(now)
    evaluator.settle()
print(read, folded)
"""


def sanitizer(cc: list[str]) -> str:
    """Path of the compiler's AddressSanitizer, to be loaded before anything else; empty where there is none."""
    said = subprocess.run(
        [*cc, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return said if Path(said).is_absolute() else ""


@pytest.mark.slow
def test_damaged_messages_touch_nothing_else(tmp_path: Path) -> None:
    """Thousands of messages that are cut, lengthened and changed."""
    cc = hatch_build.compiler()
    if cc is None or not (library := sanitizer(cc)):
        pytest.skip("needs a C compiler with AddressSanitizer")
    hatch_build.build(tmp_path / "loops.so", cc, *SANITIZED)
    said = {
        "LD_PRELOAD": library,
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",
        "KC_OTEL_MACHINE_CODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "loops.so", "6"], capture_output=True, text=True, check=False,
        env={**os.environ, **said}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    read, folded = map(int, done.stdout.split())
    assert read > 500
    assert folded > 100
