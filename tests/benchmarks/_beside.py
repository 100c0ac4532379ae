"""How long something takes while others flood, done by a process that does nothing else.

Who floods from the same process would measure how busy that is.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx

__all__ = ["beside", "healthy"]

_EVERY: Final = 0.2


@contextmanager
def beside(done: Callable[..., None], *given: Any, taken: list[float]) -> Iterator[None]:
    """Do something again and again as long as the block lasts, in a process of its own.

    Args:
        done: Once; a function of a module, of a client, how many times it was done before, and `given`.
        given: What can be pickled.
        taken: Gets the seconds of each time.
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
    """Ask for `/healthz`."""
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
