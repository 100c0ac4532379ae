"""Does what a newcomer does with a page: copies its blocks in order into an empty folder, in processes of their own.

Nothing is changed but ports, which others may hold, and names of models, which a test cannot download. Lines with
`pip install` are compared with the extras that there are and left out: what they install is installed. vLLM's wheel for
CPUs has another name than its command looks for, so that `vllm serve` starts the server's module here.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.handbook.snippets import HANDBOOK, ROOT, Snippet, snippets
from tests.tools.servers import free_address
from tests.tools.waiting import eventually

MOST_SECONDS = 600.0
"""Ten minutes from install to a verdict, without pip's own time."""
_PORTS = ("4317", "4318", "4320", "8000")
_WAIT_SECONDS = 300.0


class Newcomer:
    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        self.said = ""
        self._folder = folder
        self._ports = {port: free_address().rpartition(":")[2] for port in _PORTS}
        self._names = names
        self._running: list[subprocess.Popen[str]] = []
        tools = folder / ".tools"
        tools.mkdir()
        for name, command in (
            ("kc-otel", f'exec {sys.executable} -m kc_otel "$@"'),
            ("python", f'exec {sys.executable} "$@"'),
            (
                "vllm",
                f'shift; exec {sys.executable} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --model "$@"',
            ),
        ):
            (tools / name).write_text(f"#!/bin/sh\n{command}\n")
            (tools / name).chmod(0o755)
        path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "KC_OTEL_"))}
        self._environment = clean | {
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
            "COLUMNS": "160",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: on a CPU it would take nine tenths of the memory
        }

    def follows(self, page: str, test: str) -> str:
        """Do what a page's blocks for a test say; what the last one printed."""
        found = [snippet for snippet in snippets(HANDBOOK / page) if snippet.run_by.endswith(f"::{test}")]
        assert found, f"{page} has no block that {test} runs"
        for snippet in found:
            self.does(snippet)
        return self.said

    def does(self, snippet: Snippet) -> None:
        """Write the file that a block is, or run it."""
        text = self._mine(snippet.text)
        if snippet.title:
            (self._folder / snippet.title).write_text(text)
        elif snippet.language == "sh":
            for command in self._commands(text):
                self._run(command, snippet)
        elif snippet.language == "python":
            self._run(f"python - <<'CELL'\n{text}\nCELL", snippet)
        elif snippet.language == "text":
            for line in filter(None, map(str.strip, text.splitlines())):
                words = r"\s+".join(r".*?".join(map(re.escape, word.split("..."))) for word in line.split())
                assert re.search(words, self.said), f"{snippet}: {line!r} is not in\n{self.said}"

    def leaves(self) -> None:
        for process in reversed(self._running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _mine(self, text: str) -> str:
        for port, own in self._ports.items():
            text = re.sub(rf"\b{port}\b", own, text)
        for name, own in self._names.items():
            text = text.replace(name, own)
        return text

    def _commands(self, text: str) -> Iterator[str]:
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                self._environment[name] = shlex.split(value)[0]
            elif line and not line.startswith(("pip install", "#")):
                yield line

    def _run(self, command: str, snippet: Snippet) -> None:
        stays = command.rstrip().endswith("&")
        text = command.rstrip().removesuffix("&")
        if "kc-otel serve" in text:  # its ports are the usual ones unless it is told others, as here
            ports = (
                f"--{name}-port {self._ports[port]}"
                for name, port in zip(("grpc", "http", "api"), _PORTS, strict=False)
            )
            text = f"{text} {' '.join(ports)}"
        log = self._folder / f"log-{len(self._running)}.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", text], cwd=self._folder, env=self._environment, text=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        if stays and "kc-otel serve" in text:
            ready = lambda: _answers(self._ports["4320"]) or process.poll() is not None  # noqa: E731
            eventually(ready, _WAIT_SECONDS, 0.2, lambda: f"{snippet}: {log.read_text()[-6000:]}")
            assert process.poll() is None, f"{snippet}: {log.read_text()[-6000:]}"
        if stays:
            return
        process.wait(_WAIT_SECONDS)
        self.said = log.read_text()
        exits = {0, 1} if text.startswith(("kc-otel status", "kc-otel gate")) else {0}
        assert process.returncode in exits, f"{snippet}: exit {process.returncode}\n{self.said[-6000:]}"


@contextmanager
def newcomer(folder: Path, names: Mapping[str, str] | None = None) -> Iterator[Newcomer]:
    """Somebody who leaves in the end, and had their verdict within ten minutes; how long it took is printed."""
    made = Newcomer(folder, names or {})
    started = time.monotonic()
    try:
        yield made
        took = time.monotonic() - started
        print(f"from the first block to the verdict: {took:.0f} s, without pip's own time")
        assert took < MOST_SECONDS
    finally:
        made.leaves()


def _answers(port: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
