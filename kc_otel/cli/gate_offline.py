"""The offline stage of a gate: recordings of both kernels in, a decision, reports and evidence out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

import typer

from kc_otel.cli.api_client import get
from kc_otel.cli.terminal import attributes_of, columns_of, pairs, together, unusable
from kc_otel.contract.declared_kernels import OTHERWISE_REMEDY, declared_apart, declared_otherwise
from kc_otel.contract.load import load_source
from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import scopes
from kc_otel.contract.words import listed
from kc_otel.judge.recorders import ONE_KERNEL
from kc_otel.judge.sample_sizes import observations_to_pass
from kc_otel.offline.gate.evidence import offline_evidence, write_evidence, write_text
from kc_otel.offline.gate.findings import GateFinding, findings, for_whom, how_far, missing, notes
from kc_otel.offline.gate.junit import junit as junit_of
from kc_otel.offline.gate.markdown import headline
from kc_otel.offline.gate.markdown import markdown as markdown_of
from kc_otel.offline.gate.recorded_gate import GateTerms, OfflineGate, check_terms, decides, gate_recordings, read_input
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.importers.detect import files_of
from kc_otel.recordings.recording import Recording

_EXIT: Final = {"advance": 0, "rollback": 1, "wait": 3}
"""Exit code of each outcome of a gate."""
_SUMMARY_VARIABLE: Final = "GITHUB_STEP_SUMMARY"
_UNNAMED_SLICE: Final = "such a slice"


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
    attribute: Sequence[str] | None = None,
) -> None:
    """Judge, print, write what was asked for, and end the program with the decision's exit code.

    `recordings` returns the recordings' files. It is called once the contract and the options are known to be good,
    with the kernels and what says of a growing recording whether it decides the gate.
    """
    with unusable():
        promise, text = load_source(contract)
        named, attributes = columns_of(columns), attributes_of(attribute or ())
        terms = GateTerms(windows, tuple(require or ()), tuple(slices or ()), named, sequential, attributes)
        kernels = _kernels(promise, kernel or (), url)
        check_terms(promise, terms)
        paths = [
            file
            for path in recordings(kernels, lambda so_far: decides(promise, so_far, kernels, terms))
            for file in (files_of([Path(path)]) if Path(path).is_dir() else [path])
        ]
        inputs = [read_input(path, terms) for path in paths]
        # Evidence keeps milliseconds, and is judged again at the time that it keeps.
        gate = gate_recordings(promise, inputs, kernels, terms, round(time.time(), 3))
    with unusable(files="written"):
        written = _write(gate, text, junit, markdown, evidence)
    _print(gate)
    for line in written:
        typer.echo(line)
    raise typer.Exit(_EXIT[gate.decision.outcome])


def _kernels(contract: Contract, texts: Sequence[str], url: str) -> tuple[Kernel, Kernel]:
    """Both kernels: what the contract declares, and what is said on top of it; ValueError if they contradict."""
    names = [field.name for field in fields(Kernel) if field.init and field.name not in {"extra", "_"}]
    given, specs = pairs("--kernel", texts), {"train": contract.kernels.train, "inference": contract.kernels.inference}
    sides = {
        side: (_reported(contract, side, given[side], url) if side in given else Kernel.declared(spec)).to_plain()
        for side, spec in specs.items()
    }
    for name, value in given.items():
        side, _, field = name.partition(".")
        if side not in sides:
            raise ValueError(
                f"--kernel: {name!r} does not name a side; write train.FIELD=VALUE or inference.FIELD=VALUE"
            )
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
    served = [entry for entry in get(url, "/api/v1/contracts")["contracts"] if entry["name"] == contract.name]
    known = [kernel for entry in served for kernel in entry["kernels"] if kernel["role"] == side]
    found = [kernel["fields"] for kernel in known if kernel["version"] == version]
    if not found:
        listed = ", ".join(kernel["version"] for kernel in known) or "none"
        raise ValueError(f"--kernel: no {side} kernel {version} of {contract.name} has reported to {url}; {listed} has")
    kernel = Kernel.reported(found[0])
    if kernel.fingerprint != version:  # a field that was no text, or longer than an evaluator keeps
        raise ValueError(f"--kernel: what {version} reported does not match its fingerprint; write {side}.FIELD=VALUE")
    return kernel


def _print(gate: OfflineGate) -> None:
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
    for reason in missing(gate):
        if "windows have passed" in reason or reason.startswith("held: logits") or reason.endswith("no verdict yet"):
            typer.echo(f"  {reason}")
    for note in notes(gate):
        typer.echo(f"  note: {note}")


def _decided(gate: OfflineGate, found: Sequence[GateFinding], *, several: bool) -> Iterator[str]:
    for finding in found:
        verdict = finding.verdict
        if verdict.status in {"PASS", "NO_DATA"}:
            continue
        where = f"{verdict.cell.clause} on {for_whom(verdict.cell.slice)}" + f" in {finding.input.name}" * several
        optional = "" if finding.required else " (not required)"
        far = f"; {how_far(verdict)}" if verdict.status == "FAIL" else ""
        yield f"{verdict.status}{optional} {where}: {verdict.reason}{far}"
        if verdict.status == "INCONCLUSIVE":
            clause = next(clause for clause in gate.contract.clauses if clause.id == verdict.cell.clause)
            if observations_to_pass(gate.contract, clause, verdict.cell.slice).observations is None:
                said = "no number of observations can show that this limit is kept"
                yield f"  {said}; loosen it, or require other clauses"


def _without_data(found: Sequence[GateFinding], *, several: bool) -> Iterator[str]:
    """Yield a line for each reason why verdicts have no data, with the clauses and slices that it holds for."""
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


def _write(
    gate: OfflineGate, contract: str, junit: Path | None, markdown: Path | None, evidence: Path | None
) -> list[str]:
    if junit is not None:
        write_text(junit, junit_of(gate))
    summary = markdown_of(gate)
    if markdown is not None:
        write_text(markdown, summary)
    if os.environ.get(_SUMMARY_VARIABLE):
        with Path(os.environ[_SUMMARY_VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(summary + "\n")
    if evidence is None:
        return []
    return [f"evidence: {write_evidence(offline_evidence(gate, contract), evidence, contract)}"]
