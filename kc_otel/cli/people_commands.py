"""What fires and what people do about it: `kc-otel alerts`, `ack`, `silence`, `pin` and their ends, and the like."""

from __future__ import annotations

import getpass
import json
import time
from datetime import datetime
from typing import Annotated, Any

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get, post
from kc_otel.cli.lateness import lateness

__all__ = ["register"]

ContractArgument = Annotated[str, typer.Argument(help="Name of the contract.")]
OnlyClause = Annotated[str | None, typer.Option(help="Only this clause.")]
OnlySlice = Annotated[str | None, typer.Option(help="Only this slice; `all` for the cells of all traffic.")]
Why = Annotated[str, typer.Option(help="Why; kept with the event.")]
By = Annotated[str | None, typer.Option(help="Who; the login name by default.")]
ApiJson = Annotated[bool, typer.Option("--json", help="The API's own answer.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (alerts, ack, silence, unsilence, pin, unpin, enable_webhook, events):
        app.command(command.__name__.replace("_", "-"))(command)


def alerts(
    url: Url = DEFAULT_URL,
    contract: Annotated[str | None, typer.Option(help="Only this contract.")] = None,
    as_json: ApiJson = False,
) -> None:
    """What waits and fires, who is at work on it, and what is silenced.

    Exits with 1 when anything fires, 3 when nothing has been judged for 30 s, else 0.
    """
    found = get(url, "/api/v1/alerts", **({"contract": contract} if contract else {}))["alerts"]
    late = lateness(url)
    silences = [one for one in get(url, "/api/v1/silences")["silences"] if contract in {None, one["contract"]}]
    if as_json:
        typer.echo(json.dumps({"alerts": found, "silences": silences}, indent=2))
    else:
        if late:
            typer.echo(late)
        for one in sorted(found, key=lambda one: (one["phase"], one["contract"], one["clause"], one["slice"])):
            typer.echo(_alert_line(one))
        for one in silences:
            typer.echo(f"silence {one['id']}  {_where(one)} until {_time(one['until'])}, {one['by']}: {one['why']}")
        if not found and not silences:
            typer.echo("nothing waits, fires or is silenced")
    raise typer.Exit(1 if any(one["phase"] == "firing" for one in found) else 3 if late else 0)


def ack(
    contract: ContractArgument,
    why: Why,
    clause: OnlyClause = None,
    slice: OnlySlice = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Say that you are at work on alerts: they go on firing, and their reminders stop until they resolve."""
    body = {"contract": contract, "clause": clause, "slice": slice, **_signed(by, why)}
    taken = post(url, "/api/v1/alerts/acknowledge", body)["fingerprints"]
    typer.echo(f"{len(taken)} alert(s) acknowledged; no reminder is sent until they resolve")


def silence(
    contract: ContractArgument,
    why: Why,
    lasting: Annotated[str, typer.Option("--for", help="How long, such as 2h.", metavar="DURATION")],
    clause: OnlyClause = None,
    slice: OnlySlice = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Tell nobody of alerts for a while: no webhook, no log record. Routes, quarantines and halts go on."""
    until = time.time() + _seconds(lasting)
    body = {"contract": contract, "clause": clause, "slice": slice, "until": until, **_signed(by, why)}
    made = post(url, "/api/v1/silences", body)
    typer.echo(
        f"silence {made['id']} until {_time(made['until'])}: {_where(made)}; "
        f"end it with kc-otel unsilence {made['id']} --why ..."
    )


def unsilence(
    id: Annotated[str, typer.Argument(help="Id of the silence; `kc-otel alerts` lists them.")],
    why: Why,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """End a silence before its time; what still fires is said with the next evaluation."""
    ended = post(url, f"/api/v1/silences/{id}/end", _signed(by, why))
    typer.echo(f"silence {ended['id']} is over: {_where(ended)}")


def pin(
    contract: ContractArgument,
    kernel: Annotated[str, typer.Argument(help="train-kernel or inference-kernel.")],
    why: Why,
    slice: Annotated[str, typer.Option(help="The slice; `all` for every request.")] = "all",
    lasting: Annotated[
        str | None, typer.Option("--for", help="How long, such as 2h; without it, until unpinned.", metavar="DURATION")
    ] = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Decide which kernel serves a slice, whatever the policy routes."""
    until = None if lasting is None else time.time() + _seconds(lasting)
    body = {"contract": contract, "slice": slice, "kernel": kernel, "until": until, **_signed(by, why)}
    answer = post(url, "/api/v1/decisions/pin", body)
    end = "until it is unpinned" if until is None else f"until {_time(until)}"
    typer.echo(f"{slice} is pinned to {kernel} {end}; the decision table is now version {answer['version']}")


def unpin(
    contract: ContractArgument,
    why: Why,
    slice: Annotated[str | None, typer.Option(help="Only this slice's pin.")] = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """End pins; the routes that are in force hold again."""
    answer = post(url, "/api/v1/decisions/unpin", {"contract": contract, "slice": slice, **_signed(by, why)})
    typer.echo(f"{answer['pins']} pin(s) ended; the decision table is now version {answer['version']}")


def enable_webhook(
    contract: ContractArgument,
    endpoint: Annotated[str, typer.Argument(help="Its name in the contract.")],
    why: Why,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Send webhooks again to an endpoint that answered 410."""
    answer = post(url, "/api/v1/webhooks/enable", {"contract": contract, "endpoint": endpoint, **_signed(by, why)})
    typer.echo(f"{endpoint} is told again; {answer['waiting']} message(s) of {contract} wait for it")


def events(
    url: Url = DEFAULT_URL,
    contract: Annotated[str | None, typer.Option(help="Only this contract.")] = None,
    newest: Annotated[int, typer.Option(help="How many.", min=1, max=10_000)] = 20,
    as_json: ApiJson = False,
) -> None:
    """What changed, oldest first: verdicts, alerts, routes, and what people did, with who and why."""
    wanted: dict[str, str | int] = {"newest": newest} | ({"contract": contract} if contract else {})
    found = get(url, "/api/v1/events", **wanted)["events"]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for one in found:
        message = one["message"].removeprefix(f"{one['contract']}: ")
        typer.echo(f"{_time(one['at'])}  {one['kind']:<13} {one['contract']}: {message}")
    if not found:
        typer.echo("nothing has happened yet")


def _alert_line(one: dict[str, Any]) -> str:
    notes = [f"dry run, it would {', '.join(one['actions'])}" if one["dry_run"] else ", ".join(one["actions"])]
    if one["acknowledged"]:
        notes.append(f"acknowledged by {one['acknowledged']['by']}: {one['acknowledged']['why']}")
    if one["silenced"]:
        notes.append(f"silenced ({', '.join(one['silenced'])})")
    if one["notified"] > 1:
        notes.append(f"said {one['notified']} times")
    since = one["started_at"] if one["phase"] == "firing" else one["since"]
    return (
        f"{one['phase']:<8} {one['severity']:<8} {one['contract']}: {one['clause']} on {one['slice']} "
        f"({one['on']}) since {_time(since)}; {'; '.join(notes)}"
    )


def _where(one: dict[str, Any]) -> str:
    clause, slice = one["clause"] or "every clause", one["slice"]
    return f"{clause} of {one['contract']} on {f'slice {slice}' if slice else 'every slice'}"


def _signed(by: str | None, why: str) -> dict[str, str]:
    return {"by": by or getpass.getuser(), "why": why}


def _seconds(text: str) -> float:
    from kc_otel.contract.units import parse_duration  # noqa: PLC0415 - only where a duration is given

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--for") from None
    if seconds <= 0:
        raise typer.BadParameter("0s is over at once; write how long, such as 2h", param_hint="--for")
    return seconds


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
