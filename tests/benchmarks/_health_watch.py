"""How soon `/healthz` answers while others flood: asked by a process that does nothing else.

Who floods from the same process would measure how busy that is.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx

__all__ = ["watched_health"]

_EVERY: Final = 0.2


@contextmanager
def watched_health(api: str, taken: list[float]) -> Iterator[None]:
    """Ask for `/healthz` as long as the block lasts.

    Args:
        api: Where, such as `http://127.0.0.1:4320`.
        taken: Gets the seconds of each answer.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would have the sockets of who floods
    ended, (found, said) = spawn.Event(), spawn.Pipe(duplex=False)
    process = spawn.Process(target=_watch, args=(api, ended, said), daemon=True)
    process.start()
    said.close()
    try:
        yield
    finally:
        ended.set()
        taken += found.recv()
        process.join()


def _watch(api: str, ended: Any, said: Any) -> None:
    taken = []
    with httpx.Client(timeout=120) as client:
        while not taken or not ended.is_set():
            began = time.monotonic()
            assert client.get(f"{api}/healthz").status_code == 200
            taken.append(time.monotonic() - began)
            ended.wait(_EVERY)
    said.send(taken)
