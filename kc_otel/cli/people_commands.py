"""Alerts, and the decisions of people about them: `kc-otel alerts`, `route` and `events`."""

from __future__ import annotations

import getpass
import time
from typing import Annotated, Any

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get, post, troubles
from kc_otel.cli.terminal import ApiJson, By, OnlyContract, local_time, seconds, show

ContractArgument = Annotated[str, typer.Argument(metavar="CONTRACT", help="Name of the contract.")]
OnlyClause = Annotated[str | None, typer.Option(help="Only this clause.")]
OnlySlice = Annotated[str | None, typer.Option(help="Only this slice; `all` for the cells of all traffic.")]
Why = Annotated[str, typer.Option(help="Reason, kept with the event.")]


def list_command(url: Url = DEFAULT_URL, contract: OnlyContract = None, as_json: ApiJson = False) -> None:
    """List pending and firing alerts, their acknowledgements, silences, and breaches that are unproven.

    Exits with 1 when anything fires; 3 when a breach is unproven, the evaluator fails or has judged nothing for 30 s,
    or a webhook endpoint is disabled; else 0.

    Examples:
      kc-otel alerts list
      kc-otel alerts list --contract policy-7b --json
    """
    found = get(url, "/api/v1/alerts", **({"contract": contract} if contract else {}))["alerts"]
    overview = get(url, "/api/v1/overview")
    warned = troubles(get(url, "/api/v1/health"), overview["now"])
    mine = [row for row in overview["incidents"] if contract in {None, row["contract"]}]
    unproven = [row for row in mine if row["went_away"] or row["state"] == "unproven"]
    silences = [row for row in get(url, "/api/v1/silences")["silences"] if contract in {None, row["contract"]}]
    ordered = sorted(found, key=lambda row: (row["phase"], row["contract"], row["clause"], row["slice"]))
    lines = list(map(_alert_line, ordered))
    lines += [
        f"silence {row['id']}  {_where(row)} until {local_time(row['until'])}, {row['by']}: {row['why']}"
        for row in silences
    ]
    lines += [f"unproven  {row['contract']}: {row['headline']}; {row['state_text']}" for row in unproven]
    lines = [*warned, *(lines or ["nothing waits, fires or is silenced"])]
    show(lines, {"alerts": found, "silences": silences}, as_json=as_json)
    raise typer.Exit(1 if any(alert["phase"] == "firing" for alert in found) else 3 if warned or unproven else 0)


def ack(
    contract: ContractArgument,
    why: Why,
    clause: OnlyClause = None,
    slice: OnlySlice = None,
    close: Annotated[
        bool, typer.Option("--close", help="Close incidents that ended without proof of recovery instead.")
    ] = False,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Acknowledge alerts: they keep firing, without reminders, until they resolve.

    An incident that went away without proof of recovery stays open, and so does one of a slice whose traffic has ended;
    `--close` closes them, and acknowledges nothing. `kc-otel status` prints such incidents.

    Examples:
      kc-otel alerts ack policy-7b --why 'rolling back'
      kc-otel alerts ack policy-7b --clause token-tv --slice code --why 'rolling back'
      kc-otel alerts ack policy-7b --close --why 'the run was killed'
    """
    order = {"contract": contract, "clause": clause, "slice": slice, "close": close}
    answer = _order(url, "alerts/acknowledge", by, why, **order)
    if closed := answer["closed"]:
        many = f"{len(closed)} incident{'s' * (len(closed) != 1)}"
        typer.echo(f"{many} closed without proof of recovery: {', '.join(closed)}")
    if taken := answer["fingerprints"]:
        typer.echo(f"{len(taken)} alert{'s' * (len(taken) != 1)} acknowledged: no reminders until they resolve")


def silence(
    contract: ContractArgument,
    why: Why,
    lasting: Annotated[str, typer.Option("--for", help="How long, such as 2h.", metavar="DURATION")],
    clause: OnlyClause = None,
    slice: OnlySlice = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Silence alerts for a while: no webhook and no log record, except for the end of alerts sent before.

    Routes, quarantines and halts still happen.

    Examples:
      kc-otel alerts silence policy-7b --for 2h --why 'planned weight surgery'
    """
    until = time.time() + seconds("--for", lasting, positive=True)
    made = _order(url, "silences", by, why, contract=contract, clause=clause, slice=slice, until=until)
    typer.echo(
        f"silence {made['id']} until {local_time(made['until'])}: {_where(made)}; "
        f"end it with kc-otel alerts unsilence {made['id']} --why ..."
    )


def unsilence(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the silence; `kc-otel alerts list` lists them.")],
    why: Why,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """End a silence before it expires.

    Alerts that still fire are sent with the next evaluation.

    Examples:
      kc-otel alerts unsilence 4f2a9c10 --why 'surgery is over'
    """
    ended = _order(url, f"silences/{id}/end", by, why)
    typer.echo(f"silence {ended['id']} is over: {_where(ended)}")


def pin(
    contract: ContractArgument,
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="train-kernel or inference-kernel.")],
    why: Why,
    slice: Annotated[str, typer.Option(help="The slice; `all` for every request.")] = "all",
    lasting: Annotated[
        str | None, typer.Option("--for", help="How long, such as 2h; without it, until unpinned.", metavar="DURATION")
    ] = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Pin a slice to one kernel, overriding the policy's routes.

    Examples:
      kc-otel route pin policy-7b train-kernel --slice code --why 'int8 is broken on code'
      kc-otel route pin policy-7b inference-kernel --for 2h --why 'load test'
    """
    until = None if lasting is None else time.time() + seconds("--for", lasting, positive=True)
    answer = _order(url, "decisions/pin", by, why, contract=contract, slice=slice, kernel=kernel, until=until)
    end = "until it is unpinned" if until is None else f"until {local_time(until)}"
    typer.echo(f"{slice} is pinned to {kernel} {end}; the decision table is now version {answer['version']}")


def unpin(
    contract: ContractArgument,
    why: Why,
    slice: Annotated[str | None, typer.Option(help="Only this slice's pin.")] = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """End pins; the routes in force apply again.

    Examples:
      kc-otel route unpin policy-7b --slice code --why 'fixed in 9f1c2ab04d77'
    """
    answer = _order(url, "decisions/unpin", by, why, contract=contract, slice=slice)
    typer.echo(f"pins ended: {answer['changed']}; the decision table is now version {answer['version']}")


def resume(
    contract: ContractArgument,
    why: Annotated[str, typer.Option(help="Why it is safe again, kept with the event.")],
    slice: Annotated[str | None, typer.Option(help="Only this slice.")] = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Lift routes: send traffic back to the kernel versions that they avoid.

    Examples:
      kc-otel route resume policy-7b --why 'rolled back to 0.31'
      kc-otel route resume policy-7b --slice code --why 'recalibrated'
    """
    answer = _order(url, "decisions/resume", by, why, contract=contract, slice=slice)
    typer.echo(f"routes lifted: {answer['changed']}; the decision table is now version {answer['version']}")


def events(
    url: Url = DEFAULT_URL,
    contract: OnlyContract = None,
    newest: Annotated[int, typer.Option(help="Number of events.", min=1, max=10_000)] = 20,
    as_json: ApiJson = False,
) -> None:
    """Print what changed, oldest first: verdicts, alerts, routes, and what people did and why.

    Examples:
      kc-otel events
      kc-otel events --contract policy-7b --newest 100
    """
    wanted: dict[str, str | int] = {"newest": newest} | ({"contract": contract} if contract else {})
    found = get(url, "/api/v1/events", **wanted)["events"]
    lines = []
    for event in found:
        message = event["message"].removeprefix(f"{event['contract']}: ")
        if event["kind"] == "firing":
            due = ", ".join(map(_action, event["data"]["actions"]))
            message += "; silenced" * bool(event["data"].get("silenced")) + f"; due: {due}" * bool(due)
        lines.append(f"{local_time(event['at'])}  {event['kind']:<13} {event['contract']}: {message}")
    # The end of a cell's alerts is the same for each step of the ladder.
    show([*dict.fromkeys(lines)] or ["nothing has happened yet"], found, as_json=as_json)


def _alert_line(alert: dict[str, Any]) -> str:
    notes = [f"dry run, it would {', '.join(alert['actions'])}" if alert["dry_run"] else ", ".join(alert["actions"])]
    if alert["acknowledged"]:
        notes.append(f"acknowledged by {alert['acknowledged']['by']}: {alert['acknowledged']['why']}")
    if alert["silenced"]:
        notes.append(f"silenced ({', '.join(alert['silenced'])})")
    if alert["notified"] > 1:
        notes.append(f"announced {alert['notified']} times")
    notes += alert["undelivered"]
    since = alert["started_at"] if alert["phase"] == "firing" else alert["since"]
    kernel = f" of kernel {alert['kernel_inference']}" if alert["kernel_inference"] else ""
    kernel += f" against {alert['kernel_train']}" if alert["kernel_train"] else ""
    return (
        f"{alert['phase']:<8} {alert['severity']:<8} {alert['contract']}: {alert['clause']} on {alert['slice']} "
        f"({alert['on']}){kernel} since {local_time(since)}; {'; '.join(notes)}"
    )


def _action(written: str | dict[str, str]) -> str:
    return written if isinstance(written, str) else ", ".join(f"{kind}:{target}" for kind, target in written.items())


def _where(entry: dict[str, Any]) -> str:
    clause, slice = entry["clause"] or "every clause", entry["slice"]
    return f"{clause} of {entry['contract']} on {f'slice {slice}' if slice else 'every slice'}"


def _order(url: str, path: str, by: str | None, why: str, **body: object) -> Any:
    return post(url, f"/api/v1/{path}", {**body, "by": by or getpass.getuser(), "why": why})
