"""The report of a promotion gate, from the evidence that it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kc_otel.promotion.evidence import EvidenceError, verify_evidence
from kc_otel.report.blocks import Block, Bullets, Heading, Picture, Table, Text
from kc_otel.report.svg import draw_interval
from kc_otel.report.words import interval, number, place

__all__ = ["gate_blocks"]

_SAYS: Final = {"advance": "may leave", "rollback": "has to go back from", "wait": "has to wait in"}
_DRAWN: Final = 24


def gate_blocks(record: Mapping[str, Any]) -> tuple[Block, ...]:
    """The report as blocks.

    Args:
        record: What `kc-otel gate --evidence` wrote. A record that does not verify is reported as such, at the top.

    Raises:
        EvidenceError: If it is no such record at all.
    """
    try:
        verify_evidence(record)
        sound = "The record verifies: its checksum holds, and verdicts and decision follow from its numbers."
    except EvidenceError as error:
        if not isinstance(record, Mapping) or not {"contract", "kernel", "decision", "verdicts"} <= set(record):
            raise
        sound = f"DO NOT RELY ON THIS RECORD: {error}."
    contract, decision = record["contract"], record["decision"]
    blocks: list[Block] = [
        Heading(1, f"Kernel {record['kernel']} {_SAYS[decision['outcome']]} stage {record['stage']}"),
        Text(sound),
        Table(
            ("What", "Value"),
            (
                ("Decision", decision["outcome"]),
                ("Windows passed", str(decision["windows"])),
                ("Contract", f"{contract['name']} v{contract['version']}"),
                ("Contract hash", contract["hash"]),
                ("Time", record["time"]),
                ("Tool", f"{record['tool']['name']} {record['tool']['version']}"),
                ("Checksum", record["checksum"]),
            ),
        ),
    ]
    if decision["missing"]:
        blocks += [Heading(2, "What is missing"), Bullets(tuple(decision["missing"]))]
    blocks += [Heading(2, "Verdicts"), _table(record["verdicts"])]
    for verdict in record["verdicts"][:_DRAWN]:
        if verdict["estimate"] is not None:
            title = f"{verdict['clause']} on {place(verdict['slice'])}"
            says = (
                f"{title}: {verdict['status']}, estimate {number(verdict['estimate'])}, interval "
                f"{interval(verdict['lower'], verdict['upper'])}, limit {number(verdict['limit'])}."
            )
            drawn = draw_interval(verdict["estimate"], verdict["lower"], verdict["upper"], verdict["limit"], title)
            blocks.append(Picture(drawn, says))
    return tuple(blocks)


def _table(verdicts: list[Mapping[str, Any]]) -> Table:
    return Table(
        ("Verdict", "Clause", "Slice", "Training", "Inference", "Estimate", "Interval", "Limit", "Samples", "Method"),
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
                one["method"] or "-",
            )
            for one in verdicts
        ),
    )
