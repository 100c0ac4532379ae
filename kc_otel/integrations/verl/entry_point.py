"""Entry point of verl's group `verl.plugins`, imported in each of its processes.

verl only imports an entry point, so this module does its work when it is imported. verl does not report errors of that
import, so they are logged here. Where `KC_OTEL_CONTRACT` is not set nothing happens.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger("kc_otel")


def load() -> None:
    """Watch this process's trainer, if it gets to have one and the environment names a contract; never raises."""
    path = os.environ.get("KC_OTEL_CONTRACT")
    if not path:
        return
    try:
        from kc_otel.integrations.verl.watch import watch  # noqa: PLC0415 - nothing may be raised from here

        watch(path)
    except Exception as error:  # noqa: BLE001 - whatever it is, verl has to start
        _log.error("kc-otel: verl is not watched: %s", error)


load()
