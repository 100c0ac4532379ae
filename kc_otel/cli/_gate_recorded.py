"""The offline stage from a terminal: files in, files and a few lines out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn

import typer

from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load, load_text
from kc_otel.contract.model import Contract, KernelSpec
from kc_otel.judge.promotion.stages import Outcome
from kc_otel.judge.sample_sizes import observations_to_pass
from kc_otel.judge.verdict import Status
from kc_otel.offline.gate.evidence import offline_evidence
from kc_otel.offline.gate.findings import findings, for_whom, how_far, notes
from kc_otel.offline.gate.junit import junit
from kc_otel.offline.gate.markdown import headline, markdown
from kc_otel.offline.gate.recorded_gate import OfflineGate, Terms, check_terms, gate_recordings, read_input
from kc_otel.record.kernel import Kernel

__all__ = ["Asked", "gate_files", "kernels_of"]

_SUMMARY: Final = "GITHUB_STEP_SUMMARY"
_FIELDS: Final = tuple(field.name for field in fields(Kernel) if field.init and field.name not in {"extra", "_"})


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of `kc-otel gate --contract`."""

    contract: str
    recordings: tuple[str, ...]
    kernel: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    allow_unjudged: bool = False
    columns: str | None = None
    windows: int = 1
    junit: Path | None = None
    markdown: Path | None = None
    evidence: Path | None = None


def gate_files(asked: Asked, record: Callable[[], str] | None = None) -> Outcome:
    """Judge, print, write what was asked for, and return the decision; ends the program with 2 on what is unusable.

    Args:
        asked: The options.
        record: Makes the one recording that is judged and returns its path, where none is given; called once the
            contract and the options are known to be good.
    """
    try:
        text = sys.stdin.read() if asked.contract == "-" else None
        contract = load(asked.contract) if text is None else load_text(text, "<stdin>")
        if text is None:
            text = Path(asked.contract).read_text(encoding="utf-8")
        terms = Terms(
            asked.windows, asked.require, asked.slices, asked.allow_unjudged, _pairs("--columns", _split(asked.columns))
        )
        kernels = kernels_of(contract, asked.kernel)
        check_terms(contract, terms)
        recordings = asked.recordings if record is None else (record(),)
        inputs = [read_input(path, terms.columns) for path in recordings]
        gate = gate_recordings(contract, inputs, kernels, terms, _now())
    except ContractError as error:
        _refuse(*map(str, error.problems))
    except OSError as error:
        _refuse(f"{error.filename}: cannot be read ({error.strerror})")
    except ValueError as error:
        _refuse(str(error))
    _print(gate)
    try:
        _write(asked, gate, text)
    except OSError as error:
        _refuse(f"{error.filename}: cannot be written ({error.strerror})")
    return gate.decision.outcome


def kernels_of(contract: Contract, texts: Sequence[str]) -> tuple[Kernel, Kernel]:
    """Both kernels: what the contract declares, and what is said of them on top of it.

    Args:
        contract: The contract.
        texts: `SIDE.FIELD=VALUE`, SIDE being train or inference; `SIDE.extra.NAME=VALUE` for fields of one's own.

    Raises:
        ValueError: If a text is not of that form.
    """
    plain = {"train": _declared(contract.kernels.train), "inference": _declared(contract.kernels.inference)}
    for name, value in _pairs("--kernel", texts).items():
        side, _, field = name.partition(".")
        if side not in plain:
            raise ValueError(f"--kernel: {name!r} names no side; write train.FIELD=VALUE or inference.FIELD=VALUE")
        if field in _FIELDS:
            plain[side][field] = value
        elif field.startswith("extra.") and field != "extra.":
            plain[side].setdefault("extra", {})[field.removeprefix("extra.")] = value
        else:
            raise ValueError(
                f"--kernel: {field!r} is none of {', '.join(_FIELDS)}; write extra.{field or 'NAME'} for another"
            )
    return Kernel.from_plain(plain["train"]), Kernel.from_plain(plain["inference"])


def _declared(spec: KernelSpec) -> dict[str, Any]:
    return Kernel.declared(spec).to_plain()


def _now() -> float:
    # Evidence keeps milliseconds, and is judged again at the time that it keeps.
    return round(time.time(), 3)


def _print(gate: OfflineGate) -> None:
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
        if verdict.status is Status.INCONCLUSIVE and _never(gate, verdict.cell.clause, verdict.cell.slice):
            typer.echo("    no number of observations can show that this limit is kept; loosen it, or require others")
    passed = sum(each.verdict.status is Status.PASS for each in findings(gate))
    typer.echo(f"  PASS: {passed} verdict{'s' * (passed != 1)}")
    waits = not (gate.terms.allow_unjudged or gate.terms.require)
    for one in gate.unjudged:
        typer.echo(f"  not judged: {one}" + ("; --allow-unjudged leaves it out" if waits else ""))
    for each in gate.decision.missing:
        if "windows have passed" in each or each.startswith("held: logits") or each.endswith("no verdict yet"):
            typer.echo(f"  {each}")
    for note in notes(gate):
        typer.echo(f"  note: {note}")


def _never(gate: OfflineGate, clause: str, slice: str) -> bool:
    found = next(each for each in gate.contract.clauses if each.id == clause)
    return observations_to_pass(gate.contract, found, slice).observations is None


def _write(asked: Asked, gate: OfflineGate, text: str) -> None:
    if asked.junit is not None:
        _put(asked.junit, junit(gate))
    summary = markdown(gate)
    if asked.markdown is not None:
        _put(asked.markdown, summary)
    if os.environ.get(_SUMMARY):
        with Path(os.environ[_SUMMARY]).open("a", encoding="utf-8") as file:
            file.write(summary + "\n")
    if asked.evidence is not None:
        record = json.dumps(offline_evidence(gate, text), indent=2, sort_keys=True, allow_nan=False) + "\n"
        where = asked.evidence
        if where.suffix != ".json":
            where = where / "evidence.json"
            _put(where.with_name("contract.yaml"), text)
        _put(where, record)
        typer.echo(f"evidence: {where}")


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _split(text: str | None) -> list[str]:
    return [part for part in (text or "").split(",") if part.strip()]


def _pairs(option: str, texts: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not (name.strip() and sign and value.strip()):
            raise ValueError(f"{option}: {text!r} is not NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


def _refuse(*problems: str) -> NoReturn:
    for problem in problems:
        typer.echo(problem, err=True)
    raise typer.Exit(2)
