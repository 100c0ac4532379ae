"""`kc-otel promote --watch`: each step as it happens, and the commands before and after it.

The evaluator runs no command. A step that has a hook before it waits there until this process says that the hook has
ended well; where this process is gone, the version goes no further, and a FAIL rolls it back all the same.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import typer

from kc_otel.cli.api_client import get, post

__all__ = ["follow"]

_EVERY: Final = 1.0
_WHO: Final = "hook"


def follow(url: str, path: str, *, before: str | None, after: str | None, timeout: float) -> dict[str, Any]:
    """Print steps until the version is full, rolled back or replaced; returns where it is then.

    Args:
        url: The evaluator's API.
        path: The promotion's path in it.
        before: Command that runs before each step; the step is taken when it exits with 0, else it is held.
        after: Command that runs after each step, each rollback included.
        timeout: Seconds that a command may take.
    """
    if before is not None:
        post(url, path, {"order": "hook", "by": _WHO})
    found: dict[str, Any] = get(url, path)
    _say(found["reason"])
    said: list[str] = []
    while True:
        if found["status"] != "running" or found["stage"] == "full":
            return found
        if before is not None and found["awaiting"]:
            _before(url, path, found, before, timeout)
        elif found["missing"] != said:
            said = found["missing"]
            for each in said:
                _say(f"waits: {each}")
        time.sleep(_EVERY)
        now: dict[str, Any] = get(url, path)
        if _where(now) != _where(found):
            _say(now["reason"])
            if after is not None:
                _run(after, _about(found, now["position"], now), timeout)
        found = now


def _before(url: str, path: str, found: dict[str, Any], command: str, timeout: float) -> None:
    place = found["awaiting"]
    code = _run(command, _about(found, place, found | {"share": found["next_share"]}), timeout)
    if get(url, path)["awaiting"] != place:
        return  # it failed, or a person decided otherwise, while the hook ran; what happened is said next
    if code == 0:
        _say(f"the hook before {place} has ended well")
        post(url, path, {"order": "confirm", "by": _WHO, "position": place})
        return
    why = f"the hook before {place} took more than {timeout:g} s" if code is None else (
        f"the hook before {place} ended with exit code {code}"
    )  # fmt: skip
    _say(why)
    post(url, path, {"order": "hold", "by": _WHO, "why": why})


def _about(found: Mapping[str, Any], to: str, now: Mapping[str, Any]) -> dict[str, str]:
    return {
        "KC_PROMOTION_CONTRACT": found["contract"],
        "KC_PROMOTION_KERNEL": found["kernel"],
        "KC_PROMOTION_FROM": found["position"],
        "KC_PROMOTION_TO": to,
        "KC_PROMOTION_SHARE": f"{now['share']:g}",
        "KC_PROMOTION_STATUS": now["status"],
        "KC_PROMOTION_REASON": now["reason"],
    }


def _run(command: str, about: Mapping[str, str], timeout: float) -> int | None:
    """Exit code of a command; None when it took too long, 127 when there is no such program."""
    _say(f"$ {command}")
    try:
        done = subprocess.run(  # noqa: S603 - the user's own command, split as a shell would and run without one
            shlex.split(command), env={**os.environ, **about}, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        _say(f"{command}: {error.strerror}")
        return 127
    return done.returncode


def _where(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return found["position"], found["status"], found["attempt"]


def _say(text: str) -> None:
    typer.echo(f"{datetime.now(tz=UTC).astimezone():%H:%M:%S}  {text}")
