"""`kc-otel gate` and `verify`: may a kernel version leave its stage, and is that evidence what it claims to be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from kc_otel.cli._client import DEFAULT_URL, Url, get
from kc_otel.promotion.stages import Stage

__all__ = ["register"]

_EXIT: Final = {"advance": 0, "rollback": 1, "wait": 3}
_RECORDED: Final = "Recordings (with --contract)"
_PLANNED: Final = "Before anything is recorded (with --contract)"
_LIVE: Final = "A running evaluator (without --contract)"
_ONLY_LIVE: Final = ("stage", "since", "url")
_ONLY_RECORDED: Final = ("columns", "kernel", "require", "slice", "allow_unjudged", "junit", "markdown")
_ONLY_PLANNED: Final = ("tokens_per_second", "sampling", "tokens_per_sequence", "share")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("gate")(gate)
    app.command("verify")(verify)


def gate(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECORDING... | NAME KERNEL]",
            help="With --contract: .npz, .jsonl, .jsonl.gz or .parquet, each its own window. Without: a contract's "
            "name and the short fingerprint of an inference kernel, to ask a running evaluator.",
            show_default=False,
        ),
    ] = None,
    contract: Annotated[
        str | None, typer.Option(metavar="FILE", help="Contract that judges recordings.", rich_help_panel=_RECORDED)
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIDE.FIELD=VALUE",
            help="What a kernel was, such as inference.version=0.32.0; repeatable. The contract says the rest.",
            rich_help_panel=_RECORDED,
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAUSE", help="Only this clause has to PASS; repeatable.", rich_help_panel=_RECORDED),
    ] = None,
    slice: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only on this slice, or `all`; repeatable.", rich_help_panel=_RECORDED),
    ] = None,
    allow_unjudged: Annotated[
        bool,
        typer.Option(
            "--allow-unjudged", help="Leave out clauses that no recording can tell.", rich_help_panel=_RECORDED
        ),
    ] = False,
    columns: Annotated[
        str | None, typer.Option(help="Names of columns: train=A,inference=B.", rich_help_panel=_RECORDED)
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.", rich_help_panel=_RECORDED)
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write Markdown; it also goes to $GITHUB_STEP_SUMMARY.", rich_help_panel=_RECORDED
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Only say how many observations each clause needs at best.", rich_help_panel=_PLANNED
        ),
    ] = False,
    tokens_per_second: Annotated[
        float | None, typer.Option(min=1e-9, help="Tokens that are generated.", rich_help_panel=_PLANNED)
    ] = None,
    sampling: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1.0, help="Share that is measured; else the contract's.", rich_help_panel=_PLANNED),
    ] = None,
    tokens_per_sequence: Annotated[
        float | None, typer.Option(min=1.0, help="Else assumptions.horizon, at worst.", rich_help_panel=_PLANNED)
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="SLICE=SHARE", help="Part of the traffic; repeatable.", rich_help_panel=_PLANNED),
    ] = None,
    stage: Annotated[Stage, typer.Option(help="Stage that the version is in.", rich_help_panel=_LIVE)] = Stage.CANARY,
    since: Annotated[
        float, typer.Option(help="Unix time at which the version entered the stage.", rich_help_panel=_LIVE)
    ] = 0.0,
    url: Url = DEFAULT_URL,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Consecutive windows that must PASS; 3, of recordings 1. All given must.", show_default=False
        ),
    ] = None,
    evidence: Annotated[
        Path | None, typer.Option(metavar="FILE_OR_DIR", help="Write the evidence here, for `kc-otel verify`.")
    ] = None,
) -> None:
    """Ask whether a kernel version may leave its stage; it prints what failed or what is missing.

    With --contract FILE, recordings of both kernels are judged here: the offline stage, in a CI job. Without it, a
    running evaluator is asked about the traffic that it has seen.

    Exits with 0 to advance, 1 when the version fails, 3 to wait (undecided), 2 when something cannot be used.
    """
    given = {name for name in context.params if _was_given(context, name)}
    _refuse_mixed(given, recorded=contract is not None, plan=plan)
    if contract is None:
        if len(what or []) != 2:
            _refuse("name a contract and a kernel to ask an evaluator, or give --contract FILE and recordings")
        name, version = what or []
        _ask(name, version, stage=stage, windows=windows or 3, since=since, evidence=evidence, url=url)
        return
    # Everything below needs NumPy or more; --help does not.
    if plan:
        from kc_otel.cli._gate_plan import print_plan  # noqa: PLC0415

        if what:
            _refuse(f"--plan: reads no recording; leave {what[0]} out, or leave --plan out")
        code = print_plan(
            contract,
            windows=windows or 3,
            tokens_per_second=tokens_per_second,
            sampling=sampling,
            tokens_per_sequence=tokens_per_sequence,
            shares=share or [],
        )
        raise typer.Exit(code)
    from kc_otel.cli._gate_recorded import Asked, gate_files  # noqa: PLC0415

    if not what:
        _refuse("no recording is given; name at least one .npz, .jsonl, .jsonl.gz or .parquet, or ask for --plan")
    asked = Asked(
        contract=contract,
        recordings=tuple(what or []),
        kernel=tuple(kernel or []),
        require=tuple(require or []),
        slices=tuple(slice or []),
        allow_unjudged=allow_unjudged,
        columns=columns,
        windows=windows or 1,
        junit=junit,
        markdown=markdown,
        evidence=evidence,
    )
    raise typer.Exit(_EXIT[gate_files(asked)])


def verify(
    record: Annotated[Path, typer.Argument(help="What `kc-otel gate --evidence` wrote: the file, or its folder.")],
    recordings: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE_OR_DIR", help="Judge its recordings again; they are found by checksum; repeatable."),
    ] = None,
) -> None:
    """Check evidence: its checksum, and that its verdicts and decision follow from its own numbers.

    With --recordings, every number is computed again from the files. Exits with 1 when something does not hold.
    """
    from kc_otel.promotion.evidence import EvidenceError, verify_evidence, verify_recordings  # noqa: PLC0415

    path = record / "evidence.json" if record.is_dir() else record
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if recordings:
            verify_recordings(content, [file for each in recordings for file in _files(each)])
        else:
            verify_evidence(content)
    except OSError as error:
        print(f"{error.filename or path}: cannot be read ({error.strerror})", file=sys.stderr)
        raise typer.Exit(2) from None
    except (EvidenceError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    typer.echo(f"{path}: sound" + (", and its recordings give the same verdicts" if recordings else ""))


def _ask(
    contract: str, kernel: str, *, stage: Stage, windows: int, since: float, evidence: Path | None, url: str
) -> None:
    parameters = {"kernel": kernel, "stage": stage.value, "windows": windows, "since": str(since)}
    answer = get(url, f"/api/v1/gates/{contract}", **parameters)
    decision = answer["decision"]
    typer.echo(f"{decision['outcome']}: {kernel} in stage {stage}, {decision['windows']} of {windows} windows passed")
    for reason in decision["missing"]:
        typer.echo(f"  {reason}")
    if evidence is not None:
        if answer["evidence"] is None:
            print(f"nothing was written to {evidence}: no verdict speaks of {kernel} yet", file=sys.stderr)
        else:
            evidence.write_text(json.dumps(answer["evidence"], indent=2, sort_keys=True) + "\n", encoding="utf-8")
            typer.echo(f"evidence: {evidence}")
    raise typer.Exit(_EXIT[decision["outcome"]])


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_mixed(given: set[str], *, recorded: bool, plan: bool) -> None:
    """An option of another way to ask would be read as if it had counted."""
    if plan and not recorded:
        _refuse("--plan: needs --contract FILE")
    wrong: list[tuple[tuple[str, ...], str]] = []
    if recorded:
        wrong.append((_ONLY_LIVE, "asks a running evaluator; leave it out, or leave --contract out"))
    else:
        wrong.append((_ONLY_RECORDED, "is about recordings; give --contract FILE and recordings"))
    if plan:
        wrong.append(((*_ONLY_RECORDED, "evidence"), "is about recordings; leave it out, or leave --plan out"))
    else:
        wrong.append((_ONLY_PLANNED, "is for planning; add --plan"))
    for names, why in wrong:
        for name in names:
            if name in given:
                _refuse(f"--{name.replace('_', '-')}: {why}")


def _refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise typer.Exit(2)
