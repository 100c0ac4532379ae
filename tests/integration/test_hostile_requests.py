"""Requests that were each enough to end or to block an earlier evaluator, made against a real one, one after the other.

Beside them `/healthz` is asked all the time and an honest sender reports a kernel that breaks its limit; in the end the
verdict is there, the process has stayed small, and what was refused is counted.
"""

import gzip
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest

from tests.integration.conftest import CONTRACT, Evaluator, Meanwhile
from tests.serve.receivers.conftest import wrapped
from tests.tools.load import EXPORT, HEADERS, largest_resident, message

pytestmark = pytest.mark.slow

QUICK = 3.0
"""Seconds in which a port answers, on a machine that has much else to do; they were 12 to 46."""
MEDIAN = 0.05
"""Seconds in which an honest sender's export is acknowledged in the median, beside what it takes in peace."""
SMALL = 400 * 2**20
"""Bytes that the process may have at any time; they were 1 to 1.5 GB."""


class Beside(Meanwhile):
    """What an honest sender and a health check see meanwhile, on a thread."""

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__(0.1)
        self._evaluator, self._client = evaluator, httpx.Client(trust_env=False, timeout=60)
        self.began, self.total, self.slowest = time.time_ns(), 0, 0.0
        self.peace, self.waits = 0.0, list[float]()

    def act(self) -> None:
        begin = time.monotonic()
        self._client.get(f"{self._evaluator.api}/healthz").raise_for_status()
        self.slowest = max(self.slowest, time.monotonic() - begin)
        self.total += 200
        body = message(["honest"], self.began, self.total)
        begin = time.monotonic()
        self._client.post(f"{self._evaluator.http}/v1/metrics", content=body, headers=HEADERS)
        self.waits.append(time.monotonic() - begin)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._client.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Evaluator, Beside]]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    (folder / "policy.yaml").write_text(CONTRACT)
    evaluator = Evaluator(folder / "policy.yaml", folder / "state.sqlite", {}, "--no-webhooks")
    with Beside(evaluator) as beside:
        while len(beside.waits) < 10:
            time.sleep(0.1)
        beside.peace = statistics.median(beside.waits)
        yield evaluator, beside
    evaluator.stop()


@pytest.fixture
def survives(attacked: tuple[Evaluator, Beside]) -> Iterator[Evaluator]:
    """The evaluator, which afterwards is quick, small, judges, and has found the honest sender's kernel at fault."""
    evaluator, beside = attacked
    beside.slowest = 0.0
    beside.waits.clear()
    yield evaluator
    if len(beside.waits) >= 10:
        assert statistics.median(beside.waits) < MEDIAN + 2 * beside.peace
    judged = evaluator.get("/api/v1/health")["evaluated_at"]
    evaluator.wait("/api/v1/health", lambda said: said["evaluated_at"] > judged)
    assert beside.slowest < QUICK
    assert largest_resident(evaluator.process.pid) < SMALL
    evaluator.wait("/api/v1/verdicts", lambda said: any(cell["status"] == "FAIL" for cell in said["verdicts"]))


def post(evaluator: Evaluator, body: bytes, path: str = "/v1/metrics", **headers: str) -> int:
    return httpx.post(evaluator.http + path, content=body, headers={**HEADERS, **headers}, timeout=120).status_code


def refused(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as found:
        call()
    return found.value.code()


def test_eight_million_empty_points(survives: Evaluator) -> None:
    """Sixteen kilobytes of gzip, over both transports: refused before they are parsed."""
    bomb = gzip.compress(wrapped(wrapped(b"", 1) * 8_000_000, 10, 2, 2, 1))
    assert len(bomb) < 17_000
    assert post(survives, bomb, **{"content-encoding": "gzip"}) == 413
    plain = wrapped(wrapped(b"", 1) * 8_000_000, 10, 2, 2, 1)
    with grpc.insecure_channel(survives.grpc, compression=grpc.Compression.Gzip) as channel:
        export = channel.unary_unary(EXPORT)
        assert refused(lambda: export(plain, timeout=60)) in {
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.INVALID_ARGUMENT,
        }


def test_json_of_millions_of_empty_resources(survives: Evaluator) -> None:
    """The same in JSON."""
    body = gzip.compress(b'{"resourceMetrics":[' + b"{}," * 5_600_000 + b"{}]}")
    code = post(survives, body, **{"content-encoding": "gzip", "content-type": "application/json"})
    assert code in {400, 413}


DRIPS = {
    "request line": b"POST /v1/met",
    "headers": b"POST /v1/metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nx-name: ",
    "body": b"POST /v1/metrics HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/x-protobuf\r\n"
    b"content-length: 900000\r\n\r\n",
    "order": b"POST /api/v1/silences HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: 9000\r\n\r\n",
    "preface": b"PRI * HT",
    "settings": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 3, 0, 4, 0, 0, 0, 0, 0)),
    "frame": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5) + bytes((0, 60, 0, 1, 4, 0, 0, 0, 1)),
}
"""How far a request has come when its bytes begin to drip."""
GONE = 55.0
"""Seconds after which such a connection is no more: headers have 10, a body 30, and its rest 10 after the answer."""


def test_bytes_that_drip_keep_a_connection_for_no_longer_than_silence(survives: Evaluator) -> None:
    """A slow loris on every port, two bytes a second, wherever a request may be: who sends is not thereby in time."""
    ports = {"http": survives.http, "api": survives.api, "grpc": survives.grpc}
    left: dict[tuple[str, str], socket.socket] = {}
    with ExitStack() as stack:
        for name, address in ports.items():
            host, number = address.rpartition("/")[2].split(":")
            for what, begin in DRIPS.items():
                left[name, what] = stack.enter_context(socket.create_connection((host, int(number)), timeout=30))
                left[name, what].sendall(begin)
                left[name, what].setblocking(False)
        end = time.monotonic() + GONE
        while left and time.monotonic() < end:
            time.sleep(0.5)
            left = {of: connection for of, connection in left.items() if dripped(connection)}
    assert not left


def test_thirty_gzip_bombs(survives: Evaluator) -> None:
    """Each would be a gigabyte of zeros; its sender is told that it is too large."""
    bomb = gzip.compress(bytes(2**26)) * 16
    with ThreadPoolExecutor(30) as pool:
        assert set(pool.map(lambda _: post(survives, bomb, **{"content-encoding": "gzip"}), range(30))) <= {413, 503}


def dripped(connection: socket.socket) -> bool:
    """Send a byte more; whether the connection is still there."""
    try:
        connection.send(b"a")
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
