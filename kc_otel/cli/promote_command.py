"""`kc-otel promote`: a kernel version on its way from the offline gate to all traffic."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get, get_record, post
from kc_otel.cli.terminal import refuse
from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.words import spoken
from kc_otel.judge.promotion.stages import Stage

__all__ = ["register"]

_ORDERS: Final = "Decide (one at a time)"
_WATCHING: Final = "Follow, with hooks"
_PLANNED: Final = "Plan"
_SIGNED: Final = ("hold", "force", "rollback")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("promote")(promote)


def promote(
    contract: Annotated[str, typer.Argument(help="The contract's name, at a running evaluator.")],
    kernel: Annotated[str, typer.Argument(help="Short fingerprint of the inference kernel version.")],
    evidence: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE_OR_DIR",
            help="What `kc-otel gate run --evidence` wrote: opens offline-ci.",
            rich_help_panel=_ORDERS,
        ),
    ] = None,
    approve: Annotated[
        Stage | None, typer.Option(help="Let it into a stage that the contract asks about.", rich_help_panel=_ORDERS)
    ] = None,
    hold: Annotated[
        bool, typer.Option("--hold", help="Let it go no further; needs --why.", rich_help_panel=_ORDERS)
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="End a hold; else the wait for hooks.", rich_help_panel=_ORDERS)
    ] = False,
    force: Annotated[
        Stage | None,
        typer.Option(help="Take it on although its gate is not open; needs --why.", rich_help_panel=_ORDERS),
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Take it out of all traffic; needs --why.", rich_help_panel=_ORDERS)
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Start once more what was rolled back.", rich_help_panel=_ORDERS)
    ] = False,
    by: Annotated[str | None, typer.Option(help="Who; the login name by default.", rich_help_panel=_ORDERS)] = None,
    why: Annotated[str, typer.Option(help="Why; kept with the evidence.", rich_help_panel=_ORDERS)] = "",
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Print each step until it is full or rolled back.", rich_help_panel=_WATCHING),
    ] = False,
    hook_before: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run before each step; 0 lets it happen.", rich_help_panel=_WATCHING),
    ] = None,
    hook_after: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run after each step and rollback.", rich_help_panel=_WATCHING),
    ] = None,
    hook_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a hook may take.", rich_help_panel=_WATCHING)
    ] = 600.0,
    plan: Annotated[
        bool, typer.Option("--plan", help="How long each place takes at best.", rich_help_panel=_PLANNED)
    ] = False,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(min=1e-9, help="All traffic; else what the evaluator sees now.", rich_help_panel=_PLANNED),
    ] = None,
    tokens_per_sequence: Annotated[float | None, typer.Option(min=1.0, rich_help_panel=_PLANNED)] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="SLICE=SHARE", help="Part of the traffic; repeatable.", rich_help_panel=_PLANNED),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the evidence of every step there, for `kc-otel gate verify`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The API's own answer.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Take a kernel version through offline-ci, shadow, canary and full; the evaluator keeps where it is.

    Without an option: start it, or say where it is and what its next step waits for. Gates open by themselves, and a
    FAIL rolls back by itself. Hooks run here, never in the evaluator; they learn about the step from KC_PROMOTION_*.

    Exits with 0 when the version is full or an order was taken, 1 when it was rolled back, 3 while it is on its way, 2
    when something cannot be used.
    """
    orders = [
        name
        for name, given in {
            "evidence": evidence, "approve": approve, "hold": hold, "resume": resume, "force": force,
            "rollback": rollback, "start": again,
        }.items()
        if given
    ]  # fmt: skip
    rates = (tokens_per_second, tokens_per_sequence, share)
    _refuse_mixed(orders, watch=watch, plan=plan, hooks=(hook_before, hook_after), rates=rates)
    if plan:
        _plan(url, contract, share, tokens_per_second=tokens_per_second, tokens_per_sequence=tokens_per_sequence)
        return
    path, who = f"/api/v1/promotions/{contract}/{kernel}", by or getpass.getuser()
    if orders and orders[0] in _SIGNED and not why.strip():
        refuse(f"--{orders[0]}: say why with --why; it is kept with the evidence")
    known = {one["kernel"]: one for one in get(url, "/api/v1/promotions", contract=contract)["promotions"]}
    if kernel not in known and orders != ["start"]:
        post(url, path, {"order": "start", "by": who})
    if orders:
        body: dict[str, Any] = {"order": orders[0], "by": who, "why": why}
        if stage := approve or force:
            body["stage"] = stage.value
        if evidence is not None:
            body["evidence"] = _record(evidence)
        post(url, path, body)
    if watch:
        from kc_otel.cli.promote_watch import follow  # noqa: PLC0415 - only here

        found = follow(url, path, before=hook_before, after=hook_after, timeout=hook_timeout)
    else:
        found = get(url, path)
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))
    if save is not None:
        _save(url, path, save)
    if orders and not watch:
        return
    full = found["status"] != "rolled-back" and found["stage"] == "full"
    raise typer.Exit(0 if full else 1 if found["status"] == "rolled-back" else 3)


def _lines(found: dict[str, Any]) -> list[str]:
    kernel, share = found["kernel"], f"{100 * found['share']:g}% of the requests"
    if found["status"] == "rolled-back":
        again = f"kc-otel promote {found['contract']} {kernel} --again"
        return [f"{kernel} is rolled back and serves nothing", f"  {found['reason']}", f"  to start once more: {again}"]
    if found["status"] == "replaced":
        return [f"{kernel} was replaced", f"  {found['reason']}"]
    lines = [f"{kernel} is in {found['position']}: it may serve {share}"]
    if found["next"] is not None:
        passed = f"{found['windows']} of {found['windows_needed']} windows have passed"
        lines.append(f"  next: {found['next']}; {passed}")
    failing = found["failed_windows"]
    if failing:
        lines.append(f"  {failing} of {found['failure_limit']} failing windows until it is rolled back")
    lines += [f"  waits: {each}" for each in found["missing"] if "windows have passed" not in each]
    return [*lines, f"  {found['reason']}"]


def _plan(url: str, contract: str, shares: list[str] | None, **traffic: float | None) -> None:
    asked: dict[str, Any] = {name: str(value) for name, value in traffic.items() if value is not None}
    asked |= {"share": shares} if shares else {}
    answer = get(url, f"/api/v1/promotions/{contract}/plan", **asked)
    rate = answer["tokens_per_second"]
    seen = "no traffic is known; give --tokens-per-second" if rate is None else f"{rate:,.0f} tokens/s in all"
    typer.echo(f"at best, with identical kernels; {seen}, {100 * answer['sampling']:g}% of them measured:")
    for step in answer["steps"]:
        if step["never"]:
            typer.echo(f"  {step['position']} can never be left: {step['why']}")
            continue
        if step["seconds"] is None:
            typer.echo(f"  {step['position']}: no time: {step['why']}")
            continue
        left_out = f"; not counting {step['why']}" if step["why"] else ""
        needs = f"this gate needs about {spoken(step['seconds'])}; {step['slowest']} takes longest"
        typer.echo(f"  {step['position']}: {needs}{left_out}")
    if any(step["never"] for step in answer["steps"]):
        raise typer.Exit(2)


def _record(path: Path) -> Any:
    from kc_otel.offline.gate.evidence_files import evidence_file  # noqa: PLC0415 - only here

    file = evidence_file(path)
    try:
        return read_json_text(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"--evidence: {file}: cannot be read ({error})")


def _save(url: str, path: str, folder: Path) -> None:
    for one in get(url, f"{path}/evidence")["evidence"]:
        record = get_record(url, f"{path}/evidence/{one['id']}")
        slug = one["what"].replace(" ", "-").replace("%", "")
        file = folder / f"{one['id']:04d}-{slug}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        except OSError as error:
            refuse(f"--save: {file}: cannot be written ({error.strerror})")
        typer.echo(f"evidence: {file}")


def _refuse_mixed(
    orders: list[str], *, watch: bool, plan: bool, hooks: tuple[str | None, ...], rates: tuple[object, ...]
) -> None:
    if len(orders) > 1:
        names = " and ".join(f"--{'again' if name == 'start' else name}" for name in orders)
        refuse(f"{names}: decide one thing at a time")
    if any(hooks) and not watch:
        refuse("hooks run in this process, as long as it follows the promotion: add --watch")
    if any(rates) and not plan:
        refuse("--tokens-per-second, --tokens-per-sequence and --share are for planning; add --plan")
