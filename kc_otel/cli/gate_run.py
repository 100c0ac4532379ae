"""`kc-otel gate run`: recordings of both kernels in, a decision, reports and evidence out; the offline stage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kc_otel.cli.terminal import columns_of, pairs, refuse, unusable

if TYPE_CHECKING:
    from kc_otel.contract.model import Contract
    from kc_otel.offline.gate.recorded_gate import GatedRecording, OfflineGate
    from kc_otel.record.kernel import Kernel
    from kc_otel.recordings import Recording

__all__ = [
    "EXIT",
    "AllowUnjudged",
    "ContractFile",
    "EvidenceFile",
    "JunitFile",
    "KernelFields",
    "MarkdownFile",
    "Options",
    "Required",
    "RequiredSlices",
    "gate_offline",
    "run",
]

EXIT: Final = {"advance": 0, "rollback": 1, "wait": 3}
"""Exit code of each outcome of a gate."""
_SUMMARY: Final = "GITHUB_STEP_SUMMARY"

ContractFile = Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract's file, or - .")]
KernelFields = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        metavar="SIDE.FIELD=VALUE",
        help="What a kernel was, such as inference.version=0.32.0; repeatable. The contract says the rest.",
    ),
]
Required = Annotated[
    list[str] | None, typer.Option("--require", metavar="CLAUSE", help="Only this clause has to PASS; repeatable.")
]
RequiredSlices = Annotated[
    list[str] | None, typer.Option("--slice", metavar="NAME", help="Only on this slice, or `all`; repeatable.")
]
AllowUnjudged = Annotated[
    bool, typer.Option("--allow-unjudged", help="Leave out clauses that no recording can be judged by.")
]
JunitFile = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
MarkdownFile = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", help="Write Markdown; it also goes to $GITHUB_STEP_SUMMARY."),
]
EvidenceFile = Annotated[
    Path | None,
    typer.Option("--evidence", metavar="FILE_OR_DIR", help="Write the evidence here, for `kc-otel gate verify`."),
]
ChainFile = Annotated[
    Path | None,
    typer.Option("--chain", metavar="FILE.jsonl", help="Chain to append the evidence and the recordings to."),
]


@dataclass(frozen=True, slots=True)
class Options:
    """What `gate run` and `gate live` share."""

    contract: str
    kernel: Sequence[str]
    require: Sequence[str]
    slices: Sequence[str]
    allow_unjudged: bool
    junit: Path | None
    markdown: Path | None
    evidence: Path | None
    columns: str | None = None
    windows: int = 1
    sequential: bool = False
    chain: Path | None = None


def run(
    contract: ContractFile,
    recordings: Annotated[
        list[str],
        typer.Argument(
            metavar="RECORDING...", help=".npz, .jsonl, .jsonl.gz or .parquet of both kernels, each its own window."
        ),
    ],
    kernel: KernelFields = None,
    require: Required = None,
    slice: RequiredSlices = None,
    allow_unjudged: AllowUnjudged = False,
    windows: Annotated[int, typer.Option(min=1, help="Fewest recordings; all that are given must PASS.")] = 1,
    columns: Annotated[str | None, typer.Option(help="Names of columns: train=A,inference=B.")] = None,
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help="Bounds that hold however often you look: record more and judge again."),
    ] = False,
    junit: JunitFile = None,
    markdown: MarkdownFile = None,
    evidence: EvidenceFile = None,
    chain: ChainFile = None,
) -> None:
    """Judge recordings of both kernels: the offline stage, in a CI job.

    Exits with 0 to advance, 1 when the version fails, 3 to wait (undecided), 2 when something cannot be used.
    """
    options = Options(
        contract,
        kernel or (),
        require or (),
        slice or (),
        allow_unjudged,
        junit,
        markdown,
        evidence,
        columns,
        windows,
        sequential,
        chain,
    )
    gate_offline(options, lambda _: recordings)


def gate_offline(options: Options, recordings: Callable[[Callable[[Recording], bool]], Iterable[str | Path]]) -> None:
    """Judge, print, write what was asked for, and end the program with the decision's exit code.

    Args:
        options: The options.
        recordings: Returns the recordings' files; called once the contract and the options are known to be good, with
            what says of a growing recording whether it decides the gate.
    """
    # This needs NumPy and more; --help does not.
    from kc_otel.contract.load import load_source  # noqa: PLC0415
    from kc_otel.judge.promotion.stages import GateOutcome  # noqa: PLC0415
    from kc_otel.offline.gate.early_stop import decides, stops_after  # noqa: PLC0415
    from kc_otel.offline.gate.recorded_gate import GateTerms, check_terms, gate_recordings, read_input  # noqa: PLC0415

    if options.chain is not None and options.evidence is None:
        refuse("--chain: appends evidence, which is not written; give --evidence too")
    with unusable():
        contract, text = load_source(options.contract)
        columns = columns_of(options.columns)
        terms = GateTerms(
            options.windows,
            tuple(options.require),
            tuple(options.slices),
            options.allow_unjudged,
            columns,
            options.sequential,
        )
        kernels = _kernels(contract, options.kernel)
        check_terms(contract, terms)
        paths = recordings(lambda so_far: decides(contract, so_far, kernels, terms))
        inputs = [read_input(path, columns) for path in paths]
        # Evidence keeps milliseconds, and is judged again at the time that it keeps.
        gate = gate_recordings(contract, inputs, kernels, terms, round(time.time(), 3))
    with unusable():
        try:
            written = _write(options, gate, text)
        except OSError as error:
            refuse(f"{error.filename}: cannot be written ({error.strerror})")
    _print(gate)
    if not options.sequential and gate.decision.outcome is not GateOutcome.WAIT:
        for about, recording in inputs:
            _print_stop(about, stops_after(contract, recording, kernels, gate.terms))
    for line in written:
        typer.echo(line)
    raise typer.Exit(EXIT[gate.decision.outcome])


def _kernels(contract: Contract, texts: Sequence[str]) -> tuple[Kernel, Kernel]:
    """The training and the inference kernel: what the contract declares, and what is said of them on top of it."""
    from kc_otel.record.kernel import Kernel  # noqa: PLC0415

    names = [field.name for field in fields(Kernel) if field.init and field.name not in {"extra", "_"}]
    train, inference = (
        Kernel.declared(spec).to_plain() for spec in (contract.kernels.train, contract.kernels.inference)
    )
    for name, value in pairs("--kernel", texts).items():
        side, _, field = name.partition(".")
        if side not in {"train", "inference"}:
            raise ValueError(f"--kernel: {name!r} names no side; write train.FIELD=VALUE or inference.FIELD=VALUE")
        plain = train if side == "train" else inference
        if field in names:
            plain[field] = value
        elif field.startswith("extra.") and field != "extra.":
            plain.setdefault("extra", {})[field.removeprefix("extra.")] = value
        else:
            raise ValueError(
                f"--kernel: {field!r} is none of {', '.join(names)}; write extra.{field or 'NAME'} for another"
            )
    return Kernel.from_plain(train), Kernel.from_plain(inference)


def _print(gate: OfflineGate) -> None:
    from kc_otel.contract.sentences import scopes  # noqa: PLC0415
    from kc_otel.judge.verdict import Status  # noqa: PLC0415
    from kc_otel.offline.gate.findings import findings, for_whom, how_far, notes  # noqa: PLC0415
    from kc_otel.offline.gate.markdown import headline  # noqa: PLC0415

    typer.echo(f"{gate.decision.outcome}: {headline(gate)}")
    several = len(gate.inputs) > 1
    for finding in findings(gate):
        verdict = finding.verdict
        if verdict.status is Status.PASS:
            continue
        where = f"{verdict.cell.clause} on {for_whom(verdict.cell.slice)}" + f" in {finding.input.name}" * several
        optional = "" if finding.required else " (not required)"
        far = f"; {how_far(verdict)}" if verdict.status is Status.FAIL else ""
        typer.echo(f"  {verdict.status}{optional} {where}: {verdict.reason}{far}")
        if verdict.status is Status.INCONCLUSIVE and _never_passes(gate, verdict.cell.clause, verdict.cell.slice):
            typer.echo("    no number of observations can show that this limit is kept; loosen it, or require others")
    passed = sum(each.verdict.status is Status.PASS for each in findings(gate))
    typer.echo(f"  PASS: {passed} verdict{'s' * (passed != 1)}")
    for scope in scopes({each.verdict.cell.clause: each.verdict.about for each in findings(gate)}):
        typer.echo(f"  verdicts {scope}")
    waits = not (gate.terms.allow_unjudged or gate.terms.require)
    for one in gate.unjudged:
        typer.echo(f"  not judged: {one}" + ("; --allow-unjudged leaves it out" if waits else ""))
    for each in gate.decision.missing:
        if (
            "windows have passed" in each
            or each.startswith(("held: logits", "held: the mean"))
            or each.endswith("no verdict yet")
        ):
            typer.echo(f"  {each}")
    for note in notes(gate):
        typer.echo(f"  note: {note}")


def _print_stop(about: GatedRecording, after: int | None) -> None:
    if after is not None and after < about.sequences:
        typer.echo(f"  {about.name}: `gate live` would have stopped after {after:,} of {about.sequences:,} sequences")


def _never_passes(gate: OfflineGate, clause: str, slice: str) -> bool:
    from kc_otel.judge.sample_sizes import observations_to_pass  # noqa: PLC0415

    found = next(each for each in gate.contract.clauses if each.id == clause)
    return observations_to_pass(gate.contract, found, slice).observations is None


def _write(options: Options, gate: OfflineGate, contract: str) -> list[str]:
    """Write what was asked for; what is to be said of it."""
    from kc_otel.offline.gate.evidence import offline_evidence  # noqa: PLC0415
    from kc_otel.offline.gate.evidence_files import write_evidence, write_text  # noqa: PLC0415
    from kc_otel.offline.gate.junit import junit  # noqa: PLC0415
    from kc_otel.offline.gate.markdown import markdown  # noqa: PLC0415

    if options.junit is not None:
        write_text(options.junit, junit(gate))
    summary = markdown(gate)
    if options.markdown is not None:
        write_text(options.markdown, summary)
    if os.environ.get(_SUMMARY):
        with Path(os.environ[_SUMMARY]).open("a", encoding="utf-8") as file:
            file.write(summary + "\n")
    said: list[str] = []
    if options.evidence is not None:
        evidence = write_evidence(offline_evidence(gate, contract), options.evidence, contract)
        said.append(f"evidence: {evidence}")
        if options.chain is not None:
            from kc_otel.offline.gate.evidence_chain import add_to_chain  # noqa: PLC0415

            recordings = [Path(about.name) for about in gate.inputs]
            said.append(f"chain: its head is {add_to_chain(options.chain, [*recordings, evidence], gate.at)}")
    return said
