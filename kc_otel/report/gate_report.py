"""The report of a promotion gate, from the evidence that it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kc_otel.charts import draw_interval
from kc_otel.contract.sentences import ABOUT
from kc_otel.contract.words import interval, number, place
from kc_otel.offline.gate.evidence import EvidenceError, verify_evidence
from kc_otel.report.document import Block, Bullets, Figure, Heading, Table, Text

__all__ = ["gate_blocks"]

_SAYS: Final = {"advance": "may leave", "rollback": "has to go back from", "wait": "has to wait in"}
_MISSING: Final = {"advance": "Notes", "rollback": "Why", "wait": "What is missing"}
_DRAWN: Final = 24


def gate_blocks(record: Mapping[str, Any]) -> tuple[Block, ...]:
    """The report as blocks.

    Args:
        record: What `kc-otel gate run --evidence` wrote. A record that does not verify is reported as such, at the top.

    Raises:
        EvidenceError: If it is no such record at all.
    """
    try:
        verify_evidence(record)
        sound = "The record verifies: its checksum holds, and verdicts and decision follow from its numbers."
    except EvidenceError as error:
        sound = f"DO NOT RELY ON THIS RECORD: {error}."
        try:
            return _blocks(record, sound)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise error from None  # it cannot even be shown
    return _blocks(record, sound)


def _blocks(record: Mapping[str, Any], sound: str) -> tuple[Block, ...]:
    """The decision and what led to it; what only an auditor asks for comes last."""
    contract, decision, verdicts = record["contract"], record["decision"], record["verdicts"]
    blocks: list[Block] = [
        Heading(1, _title(record)),
        Text(f"Contract {contract['name']} v{contract['version']}, {record['time']}. {sound}"),
        *(Text(f"{name}: {value}.") for name, value in _step(record.get("step"))),
    ]
    if decision["missing"]:
        blocks += [Heading(2, _MISSING[decision["outcome"]]), Bullets(tuple(decision["missing"]))]
    blocks += [Heading(2, "Verdicts"), _table(verdicts) if verdicts else Text("None.")]
    blocks += [_drawn(one) for one in verdicts[:_DRAWN] if one["estimate"] is not None]
    if "offline" in record:
        blocks += _recordings(record["offline"])
    rows = (
        ("Decision", decision["outcome"]),
        ("Windows passed", str(decision["windows"])),
        ("Contract hash", contract["hash"]),
        ("Tool", f"{record['tool']['name']} {record['tool']['version']}"),
        ("Checksum", record["checksum"]),
    )
    return (*blocks, Heading(2, "Record"), Table(("What", "Value"), rows))


def _drawn(verdict: Mapping[str, Any]) -> Figure:
    title = f"{verdict['clause']} on {place(verdict['slice'])}"
    bounds = (verdict["lower"], verdict["upper"])
    says = (
        f"{title}: {verdict['status']}, estimate {number(verdict['estimate'])}, interval {interval(*bounds)}, "
        f"limit {number(verdict['limit'])}."
    )
    chart = draw_interval(title, verdict["estimate"], *bounds, verdict["limit"], failing=verdict["status"] == "FAIL")
    return Figure(chart, says, repeated=True)


def _title(record: Mapping[str, Any]) -> str:
    """What was decided; for a step, where the kernel version went."""
    step = record.get("step")
    if step is None:
        return f"Kernel {record['kernel']} {_SAYS[record['decision']['outcome']]} stage {record['stage']}"
    forced = f", forced by {step['by']}" if step["kind"] == "force" else ""
    return f"Kernel {record['kernel']} went from {_place(step['from'])} to {_place(step['to'])}{forced}"


def _place(one: Mapping[str, Any]) -> str:
    return f"{one['stage']} at {100 * one['share']:.3g} %" if one["stage"] == "canary" else str(one["stage"])


def _step(step: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    if step is None:
        return ()
    said = (("Step", step["kind"]), ("By", step["by"]), ("Why", step["why"]))
    return tuple((name, value) for name, value in said if value)


def _recordings(offline: Mapping[str, Any]) -> list[Block]:
    """What the gate read, and whose log-probabilities they are."""
    files = tuple(
        (one["name"], f"{one['sequences']:,}", f"{one['tokens']:,}", one["sha256"]) for one in offline["recordings"]
    )
    kernels = tuple(
        (role, ", ".join(f"{name}={value}" for name, value in sorted(fields.items()) if value is not None))
        for role, fields in sorted(offline["kernels"].items())
    )
    return [
        Heading(2, "Kernels"),
        Table(("Role", "Fields"), kernels),
        Heading(2, "Recordings"),
        Table(("File", "Sequences", "Tokens", "SHA-256"), files),
    ]


def _table(verdicts: list[Mapping[str, Any]]) -> Table:
    return Table(
        (
            "Verdict",
            "Clause",
            "Slice",
            "Training",
            "Inference",
            "Estimate",
            "Interval",
            "Limit",
            "Samples",
            "About",
            "Method",
        ),
        tuple(
            (
                one["status"],
                one["clause"],
                place(one["slice"]),
                one["kernels"]["train"] or "-",
                one["kernels"]["inference"] or "-",
                number(one["estimate"]),
                interval(one["lower"], one["upper"]),
                number(one["limit"]),
                f"{one['samples']:,}",
                ABOUT[one["about"]],
                one["method"] or "-",
            )
            for one in verdicts
        ),
    )
