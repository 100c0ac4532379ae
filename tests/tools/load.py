"""Load on an evaluator: messages, an honest sender beside those who flood, and what the process took."""

import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

import httpx
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

__all__ = ["EXPORT", "HEADERS", "beside", "healthy", "largest_resident", "message", "report"]

EXPORT: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
"""The method of OTLP/gRPC."""
HEADERS: Final = {"content-type": "application/x-protobuf"}
_EVERY: Final = 0.2


def message(
    kernels: list[str], began: int, total: int, contracts: Iterable[str] = ("policy",), *,
    ended: int | None = None, delta: bool = False, instance: str = "",
) -> bytes:  # fmt: skip
    """A histogram of each contract and kernel version, cumulative or a delta, all of it above the limit."""
    request = ExportMetricsServiceRequest()
    owner = request.resource_metrics.add()
    if instance:
        owner.resource.attributes.add(key="service.instance.id").value.string_value = instance
    data = owner.scope_metrics.add().metrics.add(name="kc.drift.tv_token", unit="1").exponential_histogram
    data.aggregation_temporality = 1 if delta else 2
    for contract, kernel in product(contracts, kernels):
        point = data.data_points.add(start_time_unix_nano=began, time_unix_nano=ended or time.time_ns())
        of = {"contract": contract, "slice": "all", "kernel.train": "a", "kernel.inference": kernel}
        for key, value in of.items():
            point.attributes.add(key=f"kc.{key}").value.string_value = value
        point.count, point.sum = total, 0.5 * total
        point.positive.offset = -2  # of scale 0: (0.25, 0.5]
        point.positive.bucket_counts.append(total)
    return request.SerializeToString()


def report(client: httpx.Client, before: int, address: str, began: int) -> None:
    """An honest sender's report, until it is taken."""
    body = message(["honest"], began, 1000 * (before + 1))
    while client.post(address, content=body, headers=HEADERS).is_error:
        time.sleep(0.1)


@contextmanager
def beside(done: Callable[..., None], *given: Any, taken: list[float]) -> Iterator[None]:
    """Do something again and again as long as the block lasts, in a process that does nothing else.

    `done` is a function of a module, of a client, how many times it was done before, and `given`; `taken` gets the
    seconds of each time. Whoever floods from the same process would measure how busy that is.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would have the sockets of who floods
    ended, (found, said) = spawn.Event(), spawn.Pipe(duplex=False)
    process = spawn.Process(target=_repeat, args=(done, given, ended, said), daemon=True)
    process.start()
    said.close()
    try:
        yield
    finally:
        ended.set()
        taken += found.recv()
        process.join()


def healthy(client: httpx.Client, before: int, api: str) -> None:
    del before
    assert client.get(f"{api}/healthz").status_code == 200


def _repeat(done: Callable[..., None], given: tuple[Any, ...], ended: Any, said: Any) -> None:
    taken: list[float] = []
    with httpx.Client(timeout=120) as client:
        while not taken or not ended.is_set():
            began = time.monotonic()
            done(client, len(taken), *given)
            taken.append(time.monotonic() - began)
            ended.wait(_EVERY)
    said.send(taken)


def largest_resident(pid: int) -> int:
    """Largest resident size of a process, bytes."""
    said = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", said)[1]) * 1024  # type: ignore[index]
