"""vLLM's OpenAI-compatible server as a process of its own, on a port of this machine that is free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

NAME = "tiny"
START_SECONDS = 300.0
STOP_SECONDS = 60.0

# What vLLM needs on a machine without a GPU and without a network; nothing of it is about recording.
_ON_A_CPU = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_OPTIONS = (
    "--dtype", "bfloat16", "--max-model-len", "1024", "--kv-cache-memory-bytes", "64M", "--enforce-eager",
    "--disable-uvicorn-access-log",
)  # fmt: skip


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        address: Base URL.
        process: Its first process, which leads the group of all of them.
    """

    address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """As the machine's memory killer would, all of its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(
    model: Path, environment: Mapping[str, str], *, log: Path, launcher: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[Server]:
    """A server until the block ends, at which it is asked to stop as an operator would.

    Args:
        model: The checkpoint.
        environment: Variables beside those of this process.
        log: File for its output.
        launcher: What to put before `python -m`, such as opentelemetry-instrument.
        options: More options of the server.

    Raises:
        RuntimeError: If it does not start; says where its output is.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *launcher, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), *_OPTIONS, *options,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            command,
            env={**os.environ, **_ON_A_CPU, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(f"http://127.0.0.1:{port}", process)
            _wait(server, log)
            yield server
        finally:
            _stop(server)


def _wait(server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{server.address}/health", timeout=5.0).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if "Error: " in line][:1] or lines[
        -20:
    ]  # what follows the first one follows from it
    raise RuntimeError("\n".join([f"vLLM did not start; its output is in {log}:", *said]))


def _stop(server: Server) -> None:
    """SIGTERM, upon which it writes what is still in its queues."""
    server.process.terminate()
    try:
        server.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
