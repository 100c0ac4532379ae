"""`kc-otel gate`: whether a kernel version may leave its stage, and whether evidence of that holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get
from kc_otel.cli.gate_live import live
from kc_otel.cli.gate_matrix import matrix
from kc_otel.cli.gate_run import EXIT, ContractFile, EvidenceFile, run
from kc_otel.cli.terminal import refuse, unusable
from kc_otel.contract.words import spoken
from kc_otel.judge.promotion.stages import Stage

if TYPE_CHECKING:
    from kc_otel.judge.promotion.plan import Planned
    from kc_otel.judge.typical_sizes import TypicalSizes

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    commands = typer.Typer(
        help="Whether a kernel version may leave its stage, and the evidence of it.", no_args_is_help=True
    )
    for command in (run, live, plan, matrix, status, chain, verify):
        commands.command(command.__name__)(command)
    app.add_typer(commands, name="gate")


def plan(
    contract: ContractFile,
    windows: Annotated[int, typer.Option(min=1, help="Consecutive windows that must PASS.")] = 3,
    tokens_per_second: Annotated[float | None, typer.Option(min=1e-9, help="Tokens that are generated.")] = None,
    sampling: Annotated[
        float | None, typer.Option(min=1e-9, max=1.0, help="Share that is measured; else the contract's.")
    ] = None,
    tokens_per_sequence: Annotated[
        float | None, typer.Option(min=1.0, help="Else assumptions.horizon, at worst.")
    ] = None,
    share: Annotated[
        list[str] | None, typer.Option(metavar="SLICE=SHARE", help="Part of the traffic; repeatable.")
    ] = None,
) -> None:
    """Say how many observations each clause needs, and how long that takes, before anything is recorded.

    At best, in windows, with identical kernels; and typically, where a gate stops as soon as it is decided.

    Exits with 2 when the gate can never open, or something cannot be used.
    """
    from kc_otel.contract.load import load  # noqa: PLC0415 - a quick --help
    from kc_otel.contract.slices import ALL  # noqa: PLC0415
    from kc_otel.judge.promotion.plan import Traffic, plan_gate, shares_of  # noqa: PLC0415
    from kc_otel.judge.typical_sizes import typical_sizes  # noqa: PLC0415

    with unusable():
        loaded = load(contract)
        traffic = Traffic(
            tokens_per_second,
            sampling or loaded.observability.sampling,
            tokens_per_sequence or loaded.assumptions.horizon,
            {ALL: 1.0} | shares_of(loaded, share or []),
        )
    planned = plan_gate(loaded, traffic, windows)
    typer.echo(f"at best, with identical kernels and {windows} window{'s' * (windows != 1)}:")
    _print_plan(planned)
    typer.echo("typically, until a gate that stops when it can (`gate live`) is decided:")
    _print_typical(typical_sizes(loaded))
    if never := [f"{each.clause} on {each.slice} can never pass: {each.why}" for each in planned if each.never]:
        refuse("\n".join(never))
    for why in dict.fromkeys(each.why for each in planned if each.why):
        typer.echo(f"no time: {why}")
    if timed := [(each.seconds, each) for each in planned if each.seconds is not None]:
        seconds, last = max(timed, key=lambda pair: pair[0])
        typer.echo(
            f"at {100 * traffic.sampling:g}% sampling this gate needs about {spoken(seconds)}; "
            f"{last.clause} on {last.slice} takes longest"
        )


def status(
    contract: Annotated[str, typer.Argument(metavar="NAME", help="The contract's name, at a running evaluator.")],
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="Short fingerprint of the inference kernel version.")],
    stage: Annotated[Stage, typer.Option(help="Stage that the version is in.")] = Stage.CANARY,
    since: Annotated[float, typer.Option(help="Unix time at which the version entered the stage.")] = 0.0,
    windows: Annotated[int, typer.Option(min=1, help="Consecutive windows that must PASS.")] = 3,
    evidence: EvidenceFile = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Ask a running evaluator about the traffic that it has seen; print what failed or what is missing.

    Exits with 0 to advance, 1 when the version fails, 3 to wait (undecided), 2 when something cannot be used.
    """
    parameters = {"kernel": kernel, "stage": stage.value, "windows": windows, "since": str(since)}
    answer = get(url, f"/api/v1/gates/{contract}", **parameters)
    decision = answer["decision"]
    typer.echo(f"{decision['outcome']}: {kernel} in stage {stage}, {decision['windows']} of {windows} windows passed")
    for reason in decision["missing"]:
        typer.echo(f"  {reason}")
    if evidence is not None:
        if answer["evidence"] is None:
            typer.echo(f"nothing was written to {evidence}: no verdict speaks of {kernel} yet", err=True)
        else:
            from kc_otel.offline.gate.evidence_files import write_evidence  # noqa: PLC0415

            try:
                typer.echo(f"evidence: {write_evidence(answer['evidence'], evidence)}")
            except OSError as error:
                refuse(f"{error.filename}: cannot be written ({error.strerror})")
    raise typer.Exit(EXIT[decision["outcome"]])


def chain(
    chain: Annotated[Path, typer.Argument(metavar="CHAIN.jsonl", help="The chain; made where there is none.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Evidence, recordings, or what else to keep.")],
) -> None:
    """Append files to a chain that shows when any of them is changed, dropped or swapped; prints the chain's head.

    Keep the head where those who can write here cannot. Exits with 1 when the chain is broken.
    """
    import time  # noqa: PLC0415 - a quick --help

    from kc_otel.offline.gate.evidence_chain import ChainError, add_to_chain  # noqa: PLC0415

    try:
        typer.echo(add_to_chain(chain, files, time.time()))
    except ChainError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        refuse(f"{error.filename or chain}: cannot be read or written ({error.strerror})")


def verify(
    record: Annotated[
        Path, typer.Argument(metavar="EVIDENCE", help="The file that a gate wrote, its folder, or a chain (.jsonl).")
    ],
    recordings: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE_OR_DIR", help="Judge its recordings again; they are found by checksum; repeatable."),
    ] = None,
    head: Annotated[str | None, typer.Option(help="Digest that the last link of a chain has to have.")] = None,
) -> None:
    """Check evidence: its checksum, and that its verdicts and decision follow from its own numbers.

    The contract and the recording that a gate wrote beside it have to be the record's. With --recordings, every number
    is computed again from the files. Of a chain, every link and every file is checked, and the first that is broken is
    named. Exits with 1 when something does not hold.
    """
    if record.suffix == ".jsonl":
        _verify_chain(record, head)
        return
    if head is not None:
        refuse(f"--head: {record} is no chain, which has a last link; name the chain (.jsonl), or leave --head out")
    from kc_otel.offline.gate.evidence import EvidenceError, verify_evidence, verify_recordings  # noqa: PLC0415
    from kc_otel.offline.gate.evidence_files import beside_problems, evidence_file, read_evidence  # noqa: PLC0415

    file = evidence_file(record)
    try:
        content = read_evidence(file)
        if recordings:
            verify_recordings(content, [each for path in recordings for each in _files(path)])
        else:
            verify_evidence(content)
        if problems := beside_problems(content, file):
            raise EvidenceError("; ".join(problems))
    except OSError as error:
        refuse(f"{error.filename or file}: cannot be read ({error.strerror})")
    except ValueError as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{file}: sound" + (", and its recordings give the same verdicts" if recordings else ""))


def _verify_chain(chain: Path, head: str | None) -> None:
    from kc_otel.offline.gate.evidence_chain import ChainError, verify_chain  # noqa: PLC0415

    try:
        count, found = verify_chain(chain, head)
    except ChainError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        refuse(f"{error.filename or chain}: cannot be read ({error.strerror})")
    kept = "" if head else "; that none is missing at its end, --head tells"
    typer.echo(f"{chain}: sound, {count} links, head {found}{kept}")


def _print_plan(planned: Sequence[Planned]) -> None:
    heads = ("clause", "slice", "observations", "time")
    rows = [heads, *((each.clause, each.slice, _count(each), _time(each)) for each in planned)]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    for *texts, time in rows:
        typer.echo("  " + "  ".join([*map(str.ljust, texts, widths), time]).rstrip())


def _print_typical(typical: Sequence[TypicalSizes]) -> None:
    heads = ("clause", "slice", "PASS at half the limit", "at 80 %", "FAIL at twice", "")
    rows = [heads, *((each.clause, each.slice, *map(_size, each.sizes), f"{each.unit}s") for each in typical)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    for row in rows:
        typer.echo("  " + "  ".join(map(str.ljust, row, widths)).rstrip())


def _size(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _count(each: Planned) -> str:
    if each.observations is None:
        return "never"
    return f"{each.observations:,} {each.unit}{'s' * (each.observations != 1)}"


def _time(each: Planned) -> str:
    if each.seconds is None:
        return "-"
    return "never" if each.seconds == math.inf else f"about {spoken(each.seconds)}"


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
