"""`kc-otel locate run --follow`: wait until a policy asks for the operator, and look when nothing else wants the CPU.

Each incident is looked at once, in a process of its own that ends with its budget. It is what the operating system
calls idle (Linux; elsewhere it has the lowest priority), so that it takes what others leave. What goes wrong is put on
the incident too: an answer that never comes would look like one that is still to come.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import typer

from kc_otel.contract.units import format_duration

_log: Final = logging.getLogger("kc_otel.locate")
_ANSWERED_EXIT_CODES: Final = frozenset({0, 1, 3})
"""Exit codes of a run that has put its answer on the incident."""


class Follower:
    """Looks at each incident of a contract once, while `asked` has slices to locate.

    `incidents` are those that last, `look` returns None or why there is no answer, `fail` puts that on an incident.
    """

    def __init__(
        self,
        asked: Callable[[], Mapping[str, str]],
        incidents: Callable[[], Sequence[Mapping[str, Any]]],
        look: Callable[[str], str | None],
        fail: Callable[[str, str], object],
    ) -> None:
        self._asked, self._incidents, self._look, self._fail = asked, incidents, look, fail
        self._done: set[str] = set()

    def step(self) -> str | None:
        """Look at the most urgent incident that nobody has looked at. Returns its id; None where there is none."""
        if not self._asked():
            return None
        for entry in self._incidents():
            located = any(diagnosis["kind"] == "locate" for diagnosis in entry["diagnoses"])
            if entry["on"] == "fail" and entry["until"] is None and not located and entry["id"] not in self._done:
                break
        else:
            return None
        found = str(entry["id"])
        self._done.add(found)
        _log.info("looking at incident %s: %s", found, entry["headline"])
        if (why := self._look(found)) is not None:
            _log.warning("incident %s: %s", found, why)
            self._fail(found, why)
        return found

    def run(self, stop: threading.Event, every: float = 2.0) -> None:
        """Examine each requested incident until stopped; keep asking an evaluator that does not answer."""
        while not stop.is_set():
            try:
                self.step()
            except typer.Exit:  # said already
                stop.wait(15.0)
            stop.wait(every)


def give_way() -> None:
    """Lower the priority of this process and its children to the minimum."""
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run_within(command: Sequence[str], budget: float, stop: threading.Event) -> str | None:
    """Run `kc-otel` with these arguments for at most so many seconds.

    Returns None where it has answered, or was stopped; else why not.
    """
    process = subprocess.Popen(  # noqa: S603 - this program
        [sys.executable, "-m", "kc_otel", *command],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        threading.Thread(target=_end_on, args=(process, stop), daemon=True).start()
        try:
            _, said = process.communicate(timeout=budget)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"not located within its budget of {format_duration(budget)}; give --budget more, or --limit less"
    if process.returncode in _ANSWERED_EXIT_CODES or stop.is_set():  # whoever follows next looks again
        return None
    lines = [line for line in said.splitlines() if line.strip()]
    return f"not located: {lines[-1].strip() if lines else f'it ended with {process.returncode}'}"


def _end_on(process: subprocess.Popen[str], stop: threading.Event) -> None:
    while process.poll() is None:
        if stop.wait(0.5):
            _kill(process)
            return


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # an engine's workers, too
