"""Take the subject of `locate` and `remedy` from an incident, and attach the answer to it."""

from __future__ import annotations

import getpass
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import typer

from kc_otel.cli.terminal import refuse
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL

IncidentId = Annotated[
    str | None,
    typer.Option(
        "--incident",
        metavar="ID",
        help="Examine the worst cell of this incident and attach the answer to it; `worst`: the contract's"
        " most urgent incident.",
    ),
]


class FailingCell(NamedTuple):
    """The worst cell of an incident; its slice is `all` only where it is broken nowhere else."""

    incident: str
    clause: str
    slice: str


def failing_cell(url: str, contract: Contract, wanted: str) -> FailingCell:
    """The cell of an incident that is farthest beyond its limit; ends the program where there is none."""
    from kc_otel.cli.api_client import get  # noqa: PLC0415 - a quick --help

    if wanted == "worst":
        found = get(url, "/api/v1/incidents", contract=contract.name)["incidents"]
        found = [candidate for candidate in found if candidate["on"] == "fail" and candidate["until"] is None]
        if not found:
            refuse(
                f"--incident: nothing of {contract.name} is broken at {url}; give the id of an incident that is over"
            )
        incident = found[0]
    else:
        incident = get(url, f"/api/v1/incidents/{wanted}")
    if incident["contract"] != contract.name:
        refuse(f"--incident: {incident['id']} is of contract {incident['contract']}, and this is {contract.name}")
    if incident["on"] != "fail":
        refuse(f"--incident: {incident['id']} says: {incident['headline']}; there is no drift to look for")
    cells = incident["cells"]
    cell = next((candidate for candidate in cells if candidate["slice"] != ALL), cells[0])
    return FailingCell(incident["id"], cell["clause"], cell["slice"])


def attach(
    url: str,
    incident: str,
    kind: Literal["locate", "remedy"],
    slice: str,
    text: str,
    evidence: Mapping[str, Any],
    by: str | None,
) -> str:
    """Put an answer on an incident; says where it stands now, for a terminal."""
    from kc_otel.cli.api_client import post  # noqa: PLC0415 - a quick --help
    from kc_otel.contract.plain_text import plain  # noqa: PLC0415

    said = {"kind": kind, "slice": slice, "text": plain(text)[:2000], "by": by or getpass.getuser()}
    evidence = json.loads(json.dumps(evidence, allow_nan=False))
    found = post(url, f"/api/v1/incidents/{incident}/diagnoses", {**said, "evidence": evidence})
    return f"on incident {incident}: {url.rstrip('/')}/#/incident/{incident} (evidence {found['evidence'][:12]})"
