"""`kc-otel promote`: a kernel version on its way from the offline gate to all traffic."""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get, get_record, poll, post
from kc_otel.cli.terminal import ApiJson, By, in_sections, local_time, refuse, show, unusable
from kc_otel.contract.plain_text import read_json_text
from kc_otel.contract.words import MEASURED_LATER, listed
from kc_otel.judge.promotion.stages import Stage

_SIGNED: Final = ("hold", "force", "rollback")
_IN_PROMOTION: Final = ("approve", "hold", "resume")
"""Orders about a version in promotion: they start none, which would take a version that serves down to 0 %."""
_POLL_SECONDS: Final = 1.0


@in_sections({"Decide (one at a time)": "start evidence approve hold resume force rollback by why"})
def promote(
    contract: Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract's name, at a running evaluator.")],
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="Short fingerprint of the inference kernel version.")],
    start: Annotated[
        bool, typer.Option("--start", help="Start the promotion, or restart it after a rollback.")
    ] = False,
    evidence: Annotated[
        Path | None,
        typer.Option(metavar="FILE_OR_DIR", help="Evidence of `kc-otel gate run --evidence`, which opens offline-ci."),
    ] = None,
    approve: Annotated[Stage | None, typer.Option(help="Let the version into a stage that requires approval.")] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Keep the version at its stage; requires --why.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="End a hold.")] = False,
    force: Annotated[
        Stage | None, typer.Option(help="Advance the version even though its gate is closed; requires --why.")
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Remove the version from all traffic; requires --why.")
    ] = False,
    by: By = None,
    why: Annotated[str, typer.Option(help="Reason, kept with the evidence.")] = "",
    watch: Annotated[
        bool, typer.Option("--watch", help="Print each step until the version reaches full or is rolled back.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the evidence of every step, for `kc-otel gate verify`."),
    ] = None,
    as_json: ApiJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Promote a kernel version through offline-ci, shadow, canary and full.

    Without options: print its stage and what the next step waits for; nothing changes. The evaluator keeps the stage,
    opens the gates, and rolls the version back on a FAIL.

    Exits with 0 if the version is at full or the action was accepted, 1 if it was rolled back or replaced, 3 while it
    is in progress, 2 if an argument cannot be used.

    Examples:
      kc-otel promote policy-7b 9f1c2ab04d77
      kc-otel promote policy-7b 9f1c2ab04d77 --start
      kc-otel promote policy-7b 9f1c2ab04d77 --watch
      kc-otel promote policy-7b 9f1c2ab04d77 --rollback --why 'latency'
    """
    orders = [
        name
        for name, given in {
            "evidence": evidence, "approve": approve, "hold": hold, "resume": resume, "force": force,
            "rollback": rollback, "start": start,
        }.items()
        if given
    ]  # fmt: skip
    if len(orders) > 1:
        refuse(f"{' and '.join(f'--{name}' for name in orders)}: decide one thing at a time")
    if orders and orders[0] in _SIGNED and not why.strip():
        refuse(f"--{orders[0]}: say why with --why; it is kept with the evidence")
    path, who = f"/api/v1/promotions/{contract}/{kernel}", by or getpass.getuser()
    if not orders:
        _look(url, contract, kernel, as_json=as_json)
    else:
        body: dict[str, Any] = {"order": orders[0], "by": who, "why": why, "start": orders[0] not in _IN_PROMOTION}
        if stage := approve or force:
            body["stage"] = stage.value
        if evidence is not None:
            body["evidence"] = _record(evidence)
        post(url, path, body)
    if watch:
        found = follow(url, path)
    else:
        found = get(url, path)
        show(_lines(found, waits=not orders), found, as_json=as_json)  # what it waits for was evaluated before an order
    if save is not None:
        _save(url, path, save)
    if orders and not watch:
        return
    over = found["status"] != "running"
    raise typer.Exit(1 if over else 0 if found["stage"] == "full" else 3)


def _look(url: str, contract: str, kernel: str, *, as_json: bool) -> None:
    """End with what would be next for a kernel that reports, where no promotion of it has begun."""
    found = get(url, "/api/v1/promotions", contract=contract)["promotions"]
    served = [entry for entry in get(url, "/api/v1/contracts")["contracts"] if entry["name"] == contract]
    seen = [other["version"] for entry in served for other in entry["kernels"] if other["role"] == "inference"]
    if kernel in {promotion["kernel"] for promotion in found} or (seen and kernel not in seen):
        return
    promote, lines = f"kc-otel promote {contract} {kernel}", [f"{kernel} is not in promotion"]
    running = [promotion for promotion in found if promotion["status"] == "running"]
    if seen and all(promotion["stage"] != "full" for promotion in running):
        tried = listed(
            [f"{of['kernel']} may serve {100 * of['share']:g}% of the requests" for of in running if of["share"]]
        )
        lines += [
            "  no version is promoted to full, so no promotion limits it" + f", except that {tried}" * bool(tried),
            f"  to record it as the promoted version: {promote} --force full --why ...",
            "  --start takes it down to the share of its first stage: 0% of the requests in offline-ci and shadow",
        ]
    typer.echo("null" if as_json else "\n".join([*lines, f"  to start it: {promote} --start"]))
    raise typer.Exit(3)


def _lines(found: dict[str, Any], *, waits: bool = True) -> list[str]:
    kernel, share = found["kernel"], f"{100 * found['share']:g}% of the requests"
    if found["status"] == "rolled-back":
        promote = f"kc-otel promote {found['contract']} {kernel}"
        lines = [f"{kernel} is rolled back and must serve nothing", f"  {found['reason']}"]
        if found["seen_serving"]:
            lines += [
                f"  {local_time(found['seen_serving'])}: it was measured after that: {MEASURED_LATER}",
                f"  once nothing serves it: {promote} --rollback --why ...",
            ]
        return [*lines, f"  to start once more: {promote} --start"]
    if found["status"] == "replaced":
        again = f"kc-otel promote {found['contract']} {kernel} --force full --why ..."
        return [f"{kernel} was replaced", f"  {found['reason']}", f"  to make it the promoted version again: {again}"]
    lines = [f"{kernel} is in {found['position']}: it may serve {share}"]
    if found["next"] is not None:
        passed = f"; {found['windows']} of {found['windows_needed']} windows have passed"
        passed += "".join(reason.partition("windows have passed")[2] for reason in found["missing"])
        lines.append(f"  next: {found['next']}{passed * (found['position'] != 'offline-ci')}")  # that asks for a gate
    failing = found["failed_windows"]
    if failing:
        lines.append(f"  {failing} of {found['failure_limit']} failing windows until it is rolled back")
    lines += [f"  waits: {reason}" for reason in found["missing"] if waits and "windows have passed" not in reason]
    if found["hold"] and "held: by" not in "".join(lines):
        lines.append(f"  held by {found['hold']['by']}: {found['hold']['why']}")
    if found["approved"]:
        lines.append(f"  approved by a person: {', '.join(found['approved'])}")
    if found["elsewhere"] and found["elsewhere"] not in "".join([found["reason"], *lines]):
        lines.append(f"  {found['elsewhere']}")
    return [*lines, f"  {found['reason']}"]


def _record(path: Path) -> Any:
    from kc_otel.offline.gate.evidence import evidence_file  # noqa: PLC0415 - only here

    file = evidence_file(path)
    try:
        return read_json_text(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"--evidence: {file}: cannot be read ({error})")


def _save(url: str, path: str, folder: Path) -> None:
    for entry in get(url, f"{path}/evidence")["evidence"]:
        record = get_record(url, f"{path}/evidence/{entry['id']}")
        slug = entry["what"].replace(" ", "-").replace("%", "")
        file = folder / f"{entry['id']:04d}-{slug}.json"
        with unusable(files="written"):
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        typer.echo(f"evidence: {file}")


def follow(url: str, path: str) -> dict[str, Any]:
    """Print steps until the version is full, rolled back or replaced; return its promotion."""
    found: dict[str, Any] = get(url, path)
    _say(found["reason"])
    waits: list[str] = []
    answers = True
    while found["status"] == "running" and found["stage"] != "full":
        if found["missing"] != waits:
            waits = found["missing"]
            for reason in waits:
                _say(f"waits: {reason}")
        time.sleep(_POLL_SECONDS)
        now = poll(url, path)
        if now is None and answers:
            _say(f"no evaluator answers at {url}; it is asked again every {_POLL_SECONDS:g} s")
        answers = now is not None
        if answers and any(now[name] != found[name] for name in ("position", "status", "attempt")):
            _say(now["reason"])
        found = now or found
    return found


def _say(text: str) -> None:
    typer.echo(f"{local_time(None, '%H:%M:%S')}  {text}")
