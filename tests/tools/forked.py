"""Processes of `kc-otel` that begin with everything imported: what a test starts hundreds of times, it can.

Python's fork server imports once and forks for each; the process runs the same command with the same arguments, and
ends as abruptly as any other when it is killed.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any, Final

__all__ = ["ForkedCommand"]

_SERVER: Final = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["kc_otel.cli", "kc_otel.cli.serve_command", "kc_otel.serve.server"])


class ForkedCommand:
    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        reader, writer = _SERVER.Pipe(duplex=False)
        self._process: Any = _SERVER.Process(target=_run, args=(tuple(arguments), dict(environ), writer))
        self._process.start()
        writer.close()
        self.stderr: IO[str] = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def returncode(self) -> int | None:
        """The exit status once it has ended; minus the signal that ended it."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)


def _run(arguments: Sequence[str], environ: Mapping[str, str], stderr: Connection) -> None:
    from kc_otel.cli import main

    os.environ.update(environ)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 - lasts as long as the process
    sys.argv = ["kc-otel", *arguments]
    main()
