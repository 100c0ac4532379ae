"""Reading the evaluator's API from a terminal, and attaching to an incident what `locate` and `remedy` answer."""

from __future__ import annotations

import getpass
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import typer

from kc_otel.cli.terminal import local_time, refuse
from kc_otel.client.credentials import TokenError, authorization, client_context
from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import plain, plain_tree
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import duration
from kc_otel.judge.decisions import LATE_SECONDS

DEFAULT_URL = "http://127.0.0.1:4320"
_TIMEOUT_SECONDS = 10.0

Url = Annotated[
    str, typer.Option("--url", envvar="KC_OTEL_URL", help="API of the evaluator.", show_default=DEFAULT_URL)
]

IncidentId = Annotated[
    str | None,
    typer.Option(
        "--incident",
        metavar="ID",
        help="Examine the worst cell of this incident and attach the answer to it; `worst`: the contract's"
        " most urgent incident.",
    ),
]


def get(url: str, path: str, **parameters: str | int) -> Any:
    """A JSON answer, its texts fit for a terminal; ends the program with a remedy where there is none."""
    return plain_tree(_call("GET", url, path, params=parameters))


def poll(url: str, path: str) -> Any:
    """A JSON answer as of `get`; None where no evaluator answers, as in a restart."""
    return plain_tree(_call("GET", url, path, patient=True))


def get_record(url: str, path: str) -> Any:
    """Return a JSON answer unchanged, for a file that has a checksum."""
    return _call("GET", url, path)


def post(url: str, path: str, body: dict[str, Any], seconds: float = _TIMEOUT_SECONDS) -> Any:
    """A JSON answer to a JSON request, waited for so long; ends the program with a remedy where there is none."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        refuse("a text is not in the terminal's encoding; use a UTF-8 locale, such as LANG=C.UTF-8")
    return _call("POST", url, path, seconds, json=body)


def troubles(health: Mapping[str, Any], now: float) -> list[str]:
    """Return warnings from the API's report, `now` being the Unix time on its machine; empty for none.

    Verdicts are late, the evaluator fails, or webhooks are disabled.
    """
    at = health["evaluated_at"]
    said: list[str] = []
    failing = [f"{name or 'all contracts'}: {fault}" for name, fault in health["failures"].items()]
    if at is None or now - at > LATE_SECONDS:
        since = "nothing has been judged yet" if at is None else f"nothing has been judged for {duration(now - at)}"
        said.append(f"{since}: {'; '.join(failing) or 'the log of the evaluator may say why'}")
    else:
        said += failing
    for hook in health["outbox"]:
        if hook["disabled"]:
            name, since = hook["endpoint"], local_time(hook["disabled_at"])
            said.append(
                f"webhooks to {name} are disabled since {since} ({hook['disabled']}), and {hook['waiting']} wait; "
                "once it accepts them, change its credential file or restart the evaluator"
            )
    return said


def _call(
    method: str, url: str, path: str, seconds: float = _TIMEOUT_SECONDS, *, patient: bool = False, **arguments: Any
) -> Any:
    try:
        tls: dict[str, Any] = {"verify": client_context()} if url.startswith("https:") else {}
        response = httpx.request(
            method, url.rstrip("/") + path, timeout=seconds, headers=authorization(), **tls, **arguments
        )
    except TokenError as error:
        refuse(error)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if patient:
            return None
        instead = "start one with `kc-otel serve CONTRACT...`, or say where it is with --url or KC_OTEL_URL"
        if "//" not in url:
            instead = f"write http://{url}"
        refuse(f"no evaluator answers at {url} ({error}); {instead}")
    if response.is_server_error and patient:
        return None
    if response.is_error:
        try:
            detail = response.json()["detail"]
        except (ValueError, LookupError, TypeError):
            detail = (
                f"this is not an evaluator's API, which is on port 4320 unless --api-port changes that: {response.text}"
            )
        said = plain(detail)
        if response.status_code != HTTPStatus.UNPROCESSABLE_ENTITY:  # that says which field, and what to write
            said = f"{url}{path}: {response.status_code}: {said}"
        refuse(said)
    try:
        return response.json()
    except ValueError:
        refuse(
            f"{url}{path}: the answer is not an evaluator's, whose API is on port 4320 unless --api-port changes that"
        )


class FailingCell(NamedTuple):
    """The worst cell of an incident; its slice is `all` only where it is broken nowhere else."""

    incident: str
    clause: str
    slice: str


def failing_cell(url: str, contract: Contract, wanted: str) -> FailingCell:
    """The cell of an incident that is farthest beyond its limit; ends the program where there is none."""
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
    said = {"kind": kind, "slice": slice, "text": plain(text)[:2000], "by": by or getpass.getuser()}
    evidence = json.loads(json.dumps(evidence, allow_nan=False))
    found = post(url, f"/api/v1/incidents/{incident}/diagnoses", {**said, "evidence": evidence})
    return f"on incident {incident}: {url.rstrip('/')}/#/incident/{incident} (evidence {found['evidence'][:12]})"
