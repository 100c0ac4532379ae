"""The worst sequences of a cell: prompts and completions, for those who may read them."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Annotated, Final

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import BaseModel

from kc_otel.contract.slices import ALL
from kc_otel.recordings.worst_sequences import WorstSequence, read_worst
from kc_otel.serve.api.people_input import SIGNER, find_clause
from kc_otel.serve.core import Core

_log: Final = logging.getLogger(__name__)
MAY_READ_PROMPTS: Final[ContextVar[bool]] = ContextVar("may_read_prompts", default=True)
"""True if the caller may read prompts: always, where callers are not authenticated."""


class WorstList(BaseModel):
    """The worst sequences of a cell, the worst first."""

    sequences: list[WorstSequence]


def worst_routes(core: Core) -> APIRouter:
    """`/api/v1/worst`."""
    router = APIRouter(prefix="/api/v1/worst", tags=["worst sequences"])

    @router.get("")
    def worst(
        response: Response,
        contract: str,
        clause: str,
        slice: str = ALL,
        kernel_inference: Annotated[str, Query(description="Fingerprint; any when left out.")] = "",
    ) -> WorstList:
        """Return the sequences of a cell that the rescorer stored, the worst first."""
        find_clause(core, contract, clause, slice)
        if not MAY_READ_PROMPTS.get():
            raise HTTPException(403, "prompts and completions are shown to tokens with may: [read, prompts]")
        if not core.worst:
            raise HTTPException(
                404, "none are kept: run `kc-otel rescore --worst FILE` and `kc-otel serve --worst FILE`"
            )
        found: list[WorstSequence] = []
        for path in core.worst:
            try:
                found += read_worst(path, contract, clause, slice, kernel_inference)
            except (OSError, ValueError) as error:
                _log.warning("%s", error)
        _log.info("%s reads the worst sequences of %s on %s of %s", SIGNER.get() or "somebody", clause, slice, contract)
        response.headers["cache-control"] = "no-store"
        return WorstList(sequences=sorted(found, key=lambda sequence: -sequence.value))

    return router
