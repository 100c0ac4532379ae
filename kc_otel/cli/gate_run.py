"""`kc-otel gate run`: recordings of both kernels in, a decision, reports and evidence out; the offline stage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get
from kc_otel.cli.terminal import Columns, columns_of, pairs, refuse, together, unusable
from kc_otel.contract.words import listed

if TYPE_CHECKING:
    from kc_otel.contract.model import Contract
    from kc_otel.offline.gate.findings import GateFinding
    from kc_otel.offline.gate.recorded_gate import OfflineGate
    from kc_otel.record.kernel import Kernel
    from kc_otel.recordings.recording import Recording

EXIT: Final = {"advance": 0, "rollback": 1, "wait": 3}
"""Exit code of each outcome of a gate."""
_SUMMARY: Final = "GITHUB_STEP_SUMMARY"
_UNNAMED_SLICE: Final = "such a slice"

ContractFile = Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract's file, or - .")]
KernelFields = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        metavar="SIDE[.FIELD]=VALUE",
        help="Field of a kernel, such as inference.version=0.32.0; the contract supplies the others. Or "
        "its fingerprint, inference=9f1c2ab04d77, if it has reported to the evaluator. Repeatable.",
    ),
]
Required = Annotated[
    list[str] | None, typer.Option("--require", metavar="CLAUSE", help="Only this clause must PASS; repeatable.")
]
RequiredSlices = Annotated[
    list[str] | None,
    typer.Option("--slice", metavar="NAME", help="Only this slice must PASS, or `all` for all traffic; repeatable."),
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


def run(
    contract: ContractFile,
    recordings: Annotated[
        list[str],
        typer.Argument(
            metavar="RECORDING...",
            help="Of both kernels, each its own window: .npz, .jsonl or .parquet, what `import` reads, or two servers' "
            "saved responses as train=SCORED,inference=SAMPLED.",
        ),
    ],
    kernel: KernelFields = None,
    require: Required = None,
    slice: RequiredSlices = None,
    windows: Annotated[int, typer.Option(min=1, help="Minimum number of recordings; each one given must PASS.")] = 1,
    columns: Columns = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Use bounds that hold however often you record more and judge again.")
    ] = False,
    junit: JunitFile = None,
    markdown: MarkdownFile = None,
    evidence: EvidenceFile = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Judge recordings of both kernels, as a CI job does: stage offline-ci.

    Exits with 0 to advance, 1 if the version fails, 3 to wait (undecided), 2 if an argument cannot be used.

    Examples:
      kc-otel gate run policy.yaml rollouts.npz
      kc-otel gate run policy.yaml rollouts.npz --junit gate.xml --evidence evidence
      kc-otel gate run policy.yaml rollouts.npz --kernel inference.version=0.32.0 --require token-tv
    """
    gate_offline(
        contract, lambda _kernels, _decided: recordings, kernel, require, slice, junit, markdown, evidence, url,
        windows=windows, columns=columns, sequential=sequential,
    )  # fmt: skip


def gate_offline(
    contract: str,
    recordings: Callable[[tuple[Kernel, Kernel], Callable[[Recording], bool]], Iterable[str | Path]],
    kernel: Sequence[str] | None,
    require: Sequence[str] | None,
    slices: Sequence[str] | None,
    junit: Path | None,
    markdown: Path | None,
    evidence: Path | None,
    url: str,
    *,
    windows: int = 1,
    columns: str | None = None,
    sequential: bool = False,
) -> None:
    """Judge, print, write what was asked for, and end the program with the decision's exit code.

    `recordings` returns the recordings' files. It is called once the contract and the options are known to be good,
    with the kernels and what says of a growing recording whether it decides the gate.
    """
    # This needs NumPy and more; --help does not.
    from kc_otel.contract.load import load_source  # noqa: PLC0415
    from kc_otel.judge.promotion.stages import GateOutcome  # noqa: PLC0415
    from kc_otel.offline.gate.early_stop import decides, stops_after  # noqa: PLC0415
    from kc_otel.offline.gate.recorded_gate import GateTerms, check_terms, gate_recordings, read_input  # noqa: PLC0415
    from kc_otel.recordings.importers.detect import files_of  # noqa: PLC0415

    with unusable():
        promise, text = load_source(contract)
        named = columns_of(columns)
        terms = GateTerms(windows, tuple(require or ()), tuple(slices or ()), named, sequential)
        kernels = _kernels(promise, kernel or (), url)
        check_terms(promise, terms)
        paths = [
            file
            for path in recordings(kernels, lambda so_far: decides(promise, so_far, kernels, terms))
            for file in (files_of([Path(path)]) if Path(path).is_dir() else [path])
        ]
        inputs = [read_input(path, named) for path in paths]
        # Evidence keeps milliseconds, and is judged again at the time that it keeps.
        gate = gate_recordings(promise, inputs, kernels, terms, round(time.time(), 3))
    with unusable():
        try:
            written = _write(gate, text, junit, markdown, evidence)
        except OSError as error:
            refuse(f"{error.filename}: cannot be written ({error.strerror})")
    _print(gate)
    if not sequential and gate.decision.outcome is not GateOutcome.WAIT:
        for about, recording in inputs:
            after = stops_after(promise, recording, kernels, gate.terms)
            if after is not None and after < about.sequences:
                seen = f"{after:,} of {about.sequences:,} sequences"
                typer.echo(f"  {about.name}: `gate live` would have stopped after {seen}")
    for line in written:
        typer.echo(line)
    raise typer.Exit(EXIT[gate.decision.outcome])


def _kernels(contract: Contract, texts: Sequence[str], url: str) -> tuple[Kernel, Kernel]:
    """The training and the inference kernel: what the contract declares, and what is said of them on top of it.

    Raises:
        ValueError: If what is said cannot be used, or is not what the contract declares.
    """
    from kc_otel.contract.declared_kernels import (  # noqa: PLC0415
        OTHERWISE_REMEDY,
        declared_apart,
        declared_otherwise,
    )
    from kc_otel.judge.kernel_names import ONE_KERNEL  # noqa: PLC0415
    from kc_otel.record.kernel import Kernel  # noqa: PLC0415

    names = [field.name for field in fields(Kernel) if field.init and field.name not in {"extra", "_"}]
    given, specs = pairs("--kernel", texts), {"train": contract.kernels.train, "inference": contract.kernels.inference}
    sides = {
        side: (_reported(contract, side, given[side], url) if side in given else Kernel.declared(spec)).to_plain()
        for side, spec in specs.items()
    }
    for name, value in given.items():
        side, _, field = name.partition(".")
        if side not in sides:
            raise ValueError(f"--kernel: {name!r} names no side; write train.FIELD=VALUE or inference.FIELD=VALUE")
        plain = sides[side]
        if name == side:
            continue
        if field in names:
            plain[field] = value
        elif field.startswith("extra.") and field != "extra.":
            plain.setdefault("extra", {})[field.removeprefix("extra.")] = value
        else:
            raise ValueError(
                f"--kernel: {field!r} is none of {', '.join(names)}; write extra.{field or 'NAME'} for another"
            )
    train, inference = (Kernel.from_plain(plain) for plain in sides.values())
    for side, kernel in (("train", train), ("inference", inference)):
        if said := declared_otherwise(specs[side], kernel.fields()):
            raise ValueError(f"--kernel: {side}: {'; '.join(said)}; {OTHERWISE_REMEDY}")
    if train == inference and declared_apart(contract.kernels):
        raise ValueError(f"--kernel: {ONE_KERNEL} ({train.fingerprint}); {OTHERWISE_REMEDY}")
    return train, inference


def _reported(contract: Contract, side: str, version: str, url: str) -> Kernel:
    """The kernel of a fingerprint, by what it has reported to the evaluator."""
    from kc_otel.record.kernel import Kernel  # noqa: PLC0415

    served = [entry for entry in get(url, "/api/v1/contracts")["contracts"] if entry["name"] == contract.name]
    known = [kernel for entry in served for kernel in entry["kernels"] if kernel["role"] == side]
    found = [kernel["fields"] for kernel in known if kernel["version"] == version]
    if not found:
        listed = ", ".join(kernel["version"] for kernel in known) or "none"
        raise ValueError(f"--kernel: no {side} kernel {version} of {contract.name} has reported to {url}; {listed} has")
    kernel = Kernel.reported(found[0])
    if kernel.fingerprint != version:  # a field that was no text, or longer than an evaluator keeps
        raise ValueError(f"--kernel: what {version} reported does not make its fingerprint; write {side}.FIELD=VALUE")
    return kernel


def _print(gate: OfflineGate) -> None:
    from kc_otel.contract.sentences import scopes  # noqa: PLC0415
    from kc_otel.offline.gate.findings import findings, notes  # noqa: PLC0415
    from kc_otel.offline.gate.markdown import headline  # noqa: PLC0415

    typer.echo(f"{gate.decision.outcome}: {headline(gate)}")
    found, several = findings(gate), len(gate.inputs) > 1
    for line in (*_decided(gate, found, several=several), *_without_data(found, several=several)):
        typer.echo(f"  {line}")
    passed = sum(finding.verdict.status == "PASS" for finding in found)
    typer.echo(f"  PASS: {passed} verdict{'s' * (passed != 1)}")
    for scope in scopes({finding.verdict.cell.clause: finding.verdict.about for finding in found}):
        typer.echo(f"  verdicts {scope}")
    held = [reason.removeprefix("held: ") for reason in gate.decision.missing]
    for cell in gate.unjudged:
        typer.echo(f"  not judged: {next((said for said in held if said.startswith(str(cell))), cell)}")
    for reason in gate.decision.missing:
        if "windows have passed" in reason or reason.startswith("held: logits") or reason.endswith("no verdict yet"):
            typer.echo(f"  {reason}")
    for note in notes(gate):
        typer.echo(f"  note: {note}")


def _decided(gate: OfflineGate, found: Sequence[GateFinding], *, several: bool) -> Iterator[str]:
    from kc_otel.offline.gate.findings import for_whom, how_far  # noqa: PLC0415

    for finding in found:
        verdict = finding.verdict
        if verdict.status in {"PASS", "NO_DATA"}:
            continue
        where = f"{verdict.cell.clause} on {for_whom(verdict.cell.slice)}" + f" in {finding.input.name}" * several
        optional = "" if finding.required else " (not required)"
        far = f"; {how_far(verdict)}" if verdict.status == "FAIL" else ""
        yield f"{verdict.status}{optional} {where}: {verdict.reason}{far}"
        if verdict.status == "INCONCLUSIVE" and _never_passes(gate, verdict.cell.clause, verdict.cell.slice):
            yield "  no number of observations can show that this limit is kept; loosen it, or require others"


def _without_data(found: Sequence[GateFinding], *, several: bool) -> Iterator[str]:
    """Yield a line for each reason why verdicts have no data, with the clauses and slices that it holds for."""
    from kc_otel.offline.gate.findings import for_whom  # noqa: PLC0415

    rows = [
        (
            ("" if finding.required else " (not required)", f" in {finding.input.name}" * several),
            finding.verdict.reason.replace(f"slice {finding.verdict.cell.slice}", _UNNAMED_SLICE),
            finding.verdict,
        )
        for finding in found
        if finding.verdict.status == "NO_DATA"
    ]
    slices = together(((about, reason, verdict.cell.clause), verdict.cell.slice) for about, reason, verdict in rows)
    alike = together(((about, reason, tuple(on)), clause) for (about, reason, clause), on in slices.items())
    for ((optional, file), reason, on), clauses in alike.items():
        where = for_whom(on[0]) if len(on) == 1 else f"slices {listed(on)}"
        why = reason.replace(_UNNAMED_SLICE, f"slice {on[0]}") if len(on) == 1 else reason
        yield f"NO_DATA{optional} {listed(clauses)} on {where}{file}: {why}"


def _never_passes(gate: OfflineGate, clause: str, slice: str) -> bool:
    from kc_otel.judge.sample_sizes import observations_to_pass  # noqa: PLC0415

    found = next(candidate for candidate in gate.contract.clauses if candidate.id == clause)
    return observations_to_pass(gate.contract, found, slice).observations is None


def _write(
    gate: OfflineGate, contract: str, junit: Path | None, markdown: Path | None, evidence: Path | None
) -> list[str]:
    from kc_otel.offline.gate.evidence import offline_evidence  # noqa: PLC0415
    from kc_otel.offline.gate.evidence_files import write_evidence, write_text  # noqa: PLC0415
    from kc_otel.offline.gate.junit import junit as junit_of  # noqa: PLC0415
    from kc_otel.offline.gate.markdown import markdown as markdown_of  # noqa: PLC0415

    if junit is not None:
        write_text(junit, junit_of(gate))
    summary = markdown_of(gate)
    if markdown is not None:
        write_text(markdown, summary)
    if os.environ.get(_SUMMARY):
        with Path(os.environ[_SUMMARY]).open("a", encoding="utf-8") as file:
            file.write(summary + "\n")
    if evidence is None:
        return []
    return [f"evidence: {write_evidence(offline_evidence(gate, contract), evidence, contract)}"]
