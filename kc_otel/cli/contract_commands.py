"""`kc-otel init`, `check`, `diff`, `gate plan` and `reference`: a contract before anything runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kc_otel.cli.terminal import PrintJson, pairs, refuse, show, unusable
from kc_otel.contract.clause import About
from kc_otel.contract.diff import diff
from kc_otel.contract.errors import LintFinding, problem_lines
from kc_otel.contract.input_reasons import REASONS
from kc_otel.contract.load import Checked, check_all, load
from kc_otel.contract.measuring_paths import MeasuringPath, left_open
from kc_otel.contract.model import Contract, KernelSpec
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, Origin
from kc_otel.contract.schema import json_schema
from kc_otel.contract.sentences import scopes
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import did_you_mean, duration, listed, plural, table_lines, together

if TYPE_CHECKING:
    from kc_otel.judge.sample_sizes import Needed
    from kc_otel.offline.draft import Written

_KERNEL_FIELDS: Final = tuple(KernelSpec.model_fields)
_CONDITION: Final = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(>=|<=|!=|==|=|>|<)\s*(\S.*?)\s*")


def init(
    reward_budget: Annotated[float, typer.Option(metavar="DRIFT", help="Largest acceptable drift of the mean reward.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write (default: NAME.yaml); - prints it.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="metadata.name, an attribute of every metric.")] = "policy",
    owner: Annotated[str, typer.Option(metavar="TEAM", help="Responsible team or person.")] = "unknown",
    train: Annotated[str, typer.Option(metavar="FIELDS", help="Such as engine=torch,dtype=bfloat16.")] = "engine=torch",
    inference: Annotated[str, typer.Option(metavar="FIELDS", help="Such as engine=vllm,dtype=fp8.")] = "engine=vllm",
    reward_range: Annotated[str, typer.Option(metavar="LOW,HIGH", help="Range of a sequence's reward.")] = "0,1",
    horizon: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Longest answer, in tokens.")] = 4096,
    clip: Annotated[float | None, typer.Option(metavar="EPSILON", help="PPO clip range, if there is one.")] = None,
    slices: Annotated[
        str, typer.Option(metavar="LIST", help="Such as 'code: task=code; long: prompt_tokens>=8192'.")
    ] = "",
    data: Annotated[MeasuringPath, typer.Option(help="How the kernels are measured.")] = MeasuringPath.LOOP,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="RECORDING", help="Recording of a pair that you accept: limits follow from it."),
    ] = None,
    margin: Annotated[float, typer.Option(min=1.0, help="Factor between the baseline and the limits.")] = 2.0,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts with which the baseline typically passes.")] = 400,
) -> None:
    """Write a commented first contract.

    With --baseline, the usual way, token limits follow from a recorded pair of kernels that you accept, and the budget
    is one more clause. Without it, the budget is the only clause on drift.

    Examples:
      kc-otel init --reward-budget 0.05
      kc-otel init --out policy.yaml --reward-budget 0.05 --baseline rollouts.npz
    """
    from kc_otel.offline.draft import Draft, write  # noqa: PLC0415 - a quick --help
    from kc_otel.offline.gate.copies import distinct, recording_notes  # noqa: PLC0415
    from kc_otel.recordings.recording_files import load_recording  # noqa: PLC0415

    target = out if out is not None else Path(f"{name}.yaml")
    with unusable(ModuleNotFoundError):
        if str(target) != "-" and target.exists():
            raise ValueError(f"--out: {target} exists; remove it, or name another file")
        kernels, where = (_kernel("--train", train), _kernel("--inference", inference)), _slices(slices)
        draft = Draft(name, owner, *kernels, reward_budget, _range(reward_range), horizon, clip, where, data)
        accepted = None if baseline is None else distinct(load_recording(baseline))
        written = write(draft, accepted, margin=margin, prompts=prompts)
        if str(target) == "-":
            typer.echo(written.text, nl=False)
        else:
            target.write_text(written.text, encoding="utf-8")
    for line in (*_summary(written, target), *(recording_notes(accepted) if accepted is not None else ())):
        typer.echo(line, err=True)
    if accepted is not None and (unknown := int(accepted.age_unknown.sum())):
        said = "it is unknown which weights sampled {:,} sequences of the baseline: limits include their staleness"
        typer.echo(said.format(unknown), err=True)


def _kernel(option: str, text: str) -> dict[str, str]:
    fields = pairs(option, text.split(","), "FIELD=VALUE")
    wrong = [field for field in fields if field not in _KERNEL_FIELDS]
    if wrong or "engine" not in fields:
        problem = f"{wrong[0]!r} is no field" if wrong else "no engine"
        known = ", ".join(_KERNEL_FIELDS)
        raise ValueError(f"{option}: {text!r}: {problem}; write engine=vllm,dtype=fp8 with fields of {known}")
    return fields


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = 0.0
    if not low < high:
        raise ValueError(f"--reward-range: {text!r} is not a range; write the smallest reward first, such as 0,1")
    return low, high


def _slices(text: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for part in filter(str.strip, text.split(";")):
        name, colon, rest = part.partition(":")
        where: dict[str, str] = {}
        for condition in rest.split(","):
            match = _CONDITION.fullmatch(condition)
            if not colon or match is None:
                said = f"{part.strip()!r} is not a slice; write name: attribute=value or name: attribute>=8192"
                raise ValueError(f"--slices: {said}")
            attribute, sign, value = match.groups()
            said = value if sign in {"=", "=="} else f"{sign} {value}"
            where[attribute] = f"{where[attribute]}, {said}" if attribute in where else said
        found[name.strip()] = where
    return found


def _summary(written: Written, target: Path) -> list[str]:
    from kc_otel.offline.draft import BUDGET  # noqa: PLC0415

    lines = [] if str(target) == "-" else [f"wrote {target}"]
    lines += [
        f"{needed.clause}: a PASS takes at least {_observations(needed)}"
        for needed in written.needed
        if needed.minimum_name and needed.observations is not None
    ]
    if written.older:
        lines.append(
            f"{written.older:,} tokens of the baseline were sampled by older weights and are left out: their drift "
            "includes staleness"
        )
    lines += [written.changed] if written.changed else []
    if written.empty:
        slices = f"slice{'s' * (len(written.empty) > 1)} {', '.join(written.empty)}"
        lines.append(f"{slices}: the baseline has no sequence of it; its limits are those of all traffic")
    if written.measured:
        lines.append(f"{', '.join(written.measured)}: limits of the baseline")
        if all(clause.id != BUDGET for clause in written.contract.clauses):
            lines.append(
                f"{BUDGET}: not asked for, because the baseline itself breaks the bound; record rewards, and the drift "
                "is measured"
            )
    if str(target) != "-":
        lines.append(f"next: kc-otel gate plan {target}")
    return lines


def check(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Contracts, folders of contracts, or - for standard input.")
    ],
    path: Annotated[
        MeasuringPath | None, typer.Option("--for", help="Also say what this way of measuring leaves open.")
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Report every error in contracts, with file and line.

    Exits with 2 when a contract cannot be used.

    Examples:
      kc-otel check contracts
      kc-otel check policy.yaml --for trl
    """
    with unusable():
        results = [
            result if result.contract is None else result.with_findings(shut_gates(result.contract))
            for result in check_all(paths)
        ]
    problems = [problem for result in results for problem in result.problems]
    lines = list(problem_lines(problems))
    for result in results:
        lines += [f"{result.source}: verdicts {scope}" for scope in scopes(_abouts(result.contract))]
        clauses = result.contract.clauses if result.contract else ()
        if assumed := ", ".join(clause.id for clause in clauses if clause.unit == "sequence"):
            lines.append(f"{result.source}: assumes that sequences are independent: {assumed}")
    errors = sum(problem.level == "error" for problem in problems)
    counts = f"{_count(errors, 'error')}, {_count(len(problems) - errors, 'warning')}"
    lines.append(f"{_count(len(results), 'file')}: {counts}")
    contracts = [result.contract for result in results if result.contract is not None]
    open_parts = [found for contract in contracts for found in (left_open(contract, path) if path else ())]
    lines += [f"{found.what}: {found.remedy}" if found.remedy else found.what for found in open_parts]
    said = {} if path is None else {str(path): [asdict(found) for found in open_parts]}
    show(lines, {"files": list(map(_result, results)), **said}, as_json=as_json)
    if any(result.contract is None for result in results):
        raise typer.Exit(2)


def shut_gates(contract: Contract) -> Iterator[LintFinding]:
    """A finding for every limit that nothing can PASS where promotions depend on it; elsewhere it is a choice."""
    holds = any(action.kind == "hold-promotion" for step in contract.escalation for action in step.do)
    if "promotion" not in contract.model_fields_set and not holds:
        return
    from kc_otel.judge.sample_sizes import observations_to_pass  # noqa: PLC0415 - SciPy

    known: dict[tuple[str, float], bool] = {}
    for section in ("numerical", "statistical", "runtime"):
        for index, clause in enumerate(getattr(contract, section)):
            for slice in (ALL, *clause.slices):
                limit = clause.limit_for(slice)
                key = (clause.id, limit)
                if key in known:
                    continue
                known[key] = observations_to_pass(contract, clause, slice).observations is not None
                if not known[key]:
                    where = (section, index, "limit") if slice == ALL else (section, index, "slices", slice)
                    yield LintFinding(
                        where,
                        f"{limit:g} keeps every promotion gate shut: even for identical kernels, no number of "
                        f"observations shows that {clause.id} is kept at confidence "
                        f"{contract.observability.confidence:g}; write a larger limit",
                    )


def plan(
    contract: Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract's file, or - for standard input.")],
    tokens_per_second: Annotated[float | None, typer.Option(min=1e-9, help="Tokens generated per second.")] = None,
    share: Annotated[
        list[str] | None, typer.Option(metavar="SLICE=PART", help="Part of them on a slice: code=0.3; repeatable.")
    ] = None,
) -> None:
    """Print how many observations each clause needs, and how long your traffic takes for them.

    Prints the best case (a window with identical kernels) and the typical case (a gate that stops once it is decided).
    Exits with 2 if the gate can never open, also by your traffic, or an argument cannot be used.

    Examples:
      kc-otel gate plan policy.yaml
      kc-otel gate plan policy.yaml --tokens-per-second 20000 --share code=0.3
    """
    from kc_otel.judge.sample_sizes import observations_to_pass, seconds_to_pass, typical_sizes  # noqa: PLC0415 - SciPy

    with unusable():
        loaded = load(contract)
        shares = {ALL: 1.0} | _shares(loaded, share or [])
    needed = [observations_to_pass(loaded, of, slice) for of in loaded.clauses for slice in loaded.slices_for(of)]
    measured = (tokens_per_second or 0.0) * loaded.observability.sampling
    times = [
        seconds_to_pass(loaded, cell, measured * shares[cell.slice]) if measured and cell.slice in shares else None
        for cell in needed
    ]
    header, rows = ["clause", "slice", "observations"], [[of.clause, of.slice, _observations(of)] for of in needed]
    if measured:
        header.append("time, of all windows")
        rows = [[*row, _time(seconds)] for row, seconds in zip(rows, times, strict=True)]
    typer.echo("at best, with identical kernels, in each window:")
    _print_rows(header, map(tuple, rows))
    typer.echo("typically, until a gate that stops when it can (`gate live`) is decided:")
    _print_rows(
        ("clause", "slice", "PASS at half the limit", "at 80 %", "FAIL at twice", ""),
        (
            (row.clause, row.slice, *("-" if size is None else f"{size:,}" for size in row.sizes), plural(row.unit))
            for row in typical_sizes(loaded)
        ),
    )
    impossible = "not even identical kernels can show that this limit is kept; loosen it"
    window = format_duration(loaded.observability.long_window)
    thin = f"its observations take longer than the long window of {window}; sample more, or lengthen it"
    never = together(
        ((cell.clause, impossible if cell.observations is None else thin), cell.slice)
        for cell, seconds in zip(needed, times, strict=True)
        if cell.observations is None or seconds == math.inf
    )
    if never:
        refuse(
            "\n".join(f"{clause} on {listed(slices)} can never pass: {why}" for (clause, why), slices in never.items())
        )
    if unknown := [name for name in loaded.slices if measured and name not in shares]:
        typer.echo(f"no time on {listed(unknown)}: give --share {unknown[0]}=PART of the traffic")


def diff_command(
    old: Annotated[str, typer.Argument(metavar="OLD", help="The version in force, or - for standard input.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The version under review, or - for standard input.")],
    as_json: PrintJson = False,
) -> None:
    """Print what a new version of a contract tightens, loosens, adds and drops.

    Exits with 1 when anything loosens, with 2 when a version cannot be read.

    Examples:
      kc-otel diff in-force.yaml policy.yaml
      kc-otel diff - policy.yaml < in-force.yaml
    """
    with unusable():
        changes = diff(load(old), load(new))
    loosening = [change for change in changes if change.loosening]
    lines = [f"{change.kind:<9} {change.field}: {change.sentence}" for change in changes]
    total = f"{_count(len(changes), 'change')}, {len(loosening) or 'none'} loosening" if changes else "no difference"
    data = {"loosens": bool(loosening), "changes": list(map(asdict, changes))}
    show([*lines, total], data, as_json=as_json)
    if loosening:
        raise typer.Exit(1)


def schema() -> None:
    """Print the JSON Schema of a contract, for editors.

    Examples:
      kc-otel reference schema > kernel-contract.schema.json
    """
    typer.echo(json.dumps(json_schema(), indent=2))


def metrics() -> None:
    """List every metric that a clause can limit.

    Examples:
      kc-otel reference metrics
    """
    for source in Origin:
        typer.echo(f"Measured from {source}:")
        for quantity in QUANTITIES.values():
            if quantity.source is source:
                about = f"{quantity.unit}, by default {quantity.statistic} per {quantity.per}"
                typer.echo(f"  {quantity.key} ({about})\n      {quantity.meaning}")
    typer.echo("Derived from a mean:")
    for derived in DERIVED.values():
        typer.echo(f"  {derived.key} ({', '.join((derived.unit, *derived.needs))})\n      {derived.meaning}")
    typer.echo("Any gen_ai.* histogram can be limited too, under runtime.")


def invalid_input() -> None:
    """List the reasons for not measuring a sequence, each with its meaning and remedy.

    Examples:
      kc-otel reference invalid-input
    """
    for name, reason in REASONS.items():
        typer.echo(f"{name}\n    {reason.meaning}\n    {reason.remedy}")


def _result(result: Checked) -> dict[str, Any]:
    contract = result.contract
    about = contract and {"name": contract.name, "version": contract.metadata.version, "hash": contract.hash}
    return {
        "file": Path(result.source).as_posix(),
        "contract": about,
        "about": _abouts(contract),
        "problems": [asdict(problem) for problem in result.problems],
    }


def _abouts(contract: Contract | None) -> dict[str, About]:
    return {clause.id: clause.about for clause in contract.clauses} if contract else {}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _print_rows(header: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; slices of a clause whose rows are alike have one row."""
    alike = together(((clause, *rest), slice) for clause, slice, *rest in rows)
    for line in table_lines(header, [(clause, listed(slices), *rest) for (clause, *rest), slices in alike.items()]):
        typer.echo(f"  {line}")


def _shares(contract: Contract, texts: Sequence[str]) -> dict[str, float]:
    found = {}
    for name, part in pairs("--share", texts, "SLICE=PART").items():
        if name not in contract.slices:
            known = did_you_mean(name, contract.slices, "there are")
            raise ValueError(f"--share: the contract has no slice {name!r}; {known}")
        found[name] = float(part) if part.replace(".", "", 1).isdecimal() else math.nan
        if not 0.0 < found[name] <= 1.0:
            raise ValueError(f"--share: {part!r} is not a part of the traffic; write {name}=0.1 for a tenth")
    return found


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return "never" if seconds == math.inf else f"about {duration(seconds)}"


def _observations(cell: Needed) -> str:
    if cell.observations is None:
        return "never"
    count = max(cell.observations, cell.minimum)
    return f"{count:,} {cell.unit if count == 1 else plural(cell.unit)}"
