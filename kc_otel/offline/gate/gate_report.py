"""An offline gate's report: findings, worst first, and one list of lines, for a terminal, as Markdown and as JUnit XML.

In the XML an undecided clause is skipped: the exit code tells a gate that waits from one that opens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final
from xml.etree import ElementTree as ET

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.sentences import scopes
from kc_otel.contract.words import listed, named_place, together
from kc_otel.judge.promotion.stages import GateOutcome
from kc_otel.judge.sample_sizes import observations_to_pass
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.recorded_gate import GatedRecording, OfflineGate
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts

_MARK: Final = {Status.FAIL: "❌", Status.INCONCLUSIVE: "❔", Status.NO_DATA: "❔", Status.PASS: "✅"}
_OUTCOME_MARK: Final = {GateOutcome.ADVANCE: "✅", GateOutcome.ROLLBACK: "❌", GateOutcome.WAIT: "⏸️"}
_MAX_ROWS: Final = 200
"""Rows of a table; a job's summary has a size that CI systems cut it at."""
_MARKDOWN_CHARACTERS: Final = re.compile(r"([\\|<>`*_\[\]])")
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_UNNAMED_SLICE: Final = "such a slice"
_JUNIT_NAME: Final = "kernel contract "
_MARKDOWN_END: Final = ": of each PASS, and against any FAIL by chance"


@dataclass(frozen=True, slots=True)
class GateFinding:
    """A verdict on a recording, and whether the gate asks for its PASS."""

    verdict: Verdict
    input: GatedRecording
    required: bool


def findings(gate: OfflineGate) -> tuple[GateFinding, ...]:
    """Every verdict: failures by excess, then undecided ones, then passes with the smallest margin first."""
    terms = gate.terms
    found = [
        GateFinding(
            verdict,
            about,
            (not terms.require or verdict.cell.clause in terms.require)
            and (not terms.slices or verdict.cell.slice in terms.slices),
        )
        for about, judged in zip(gate.inputs, gate.judged, strict=True)
        for verdict in judged.verdicts
    ]
    return tuple(sorted(found, key=_badness))


def how_far(verdict: Verdict) -> str:
    """Say by what factor a limit is exceeded or kept, from the bound that decided."""
    if verdict.status is Status.NO_DATA:
        return ""
    if verdict.status is Status.FAIL:
        if verdict.limit > 0:
            return f"at least {_times(verdict.lower / verdict.limit)} the limit"
        return f"at least {verdict.lower - verdict.limit:.3g} above the limit"
    if not math.isfinite(verdict.upper):
        return "no upper bound"
    if verdict.limit > 0:
        return f"at most {_times(max(verdict.upper, 0.0) / verdict.limit)} the limit"
    return f"at most {verdict.upper - verdict.limit:.3g} above the limit"


def missing(gate: OfflineGate) -> tuple[str, ...]:
    """Return what the gate waits for. Whether a single window has passed, its verdicts say."""
    return tuple(
        reason for reason in gate.decision.missing if len(gate.inputs) > 1 or "windows have passed" not in reason
    )


def notes(gate: OfflineGate) -> tuple[str, ...]:
    """Return notes for the reader besides the verdicts."""
    said = [
        f"{rec.name}: {note}"
        for rec, judged in zip(gate.inputs, gate.judged, strict=True)
        for note in _notes_on(gate.contract, rec, judged)
    ]
    if gate.terms.sequential:
        said.append("bounds hold at every number of sequences at once: the gate may stop as soon as it is decided")
    for names, other in ((gate.terms.require, "of any other clause"), (gate.terms.slices, "on any other slice")):
        if names:
            said.append(f"only {', '.join(names)} had to pass; a failure {other} still rejects the kernel")
    return tuple(said)


def _notes_on(contract: Contract, rec: GatedRecording, judged: RecordingVerdicts) -> Iterator[str]:
    yield from rec.notes
    if rec.unchecked:
        yield rec.unchecked
    span = contract.assumptions.reward_range
    if judged.unknown_rewards and span is not None:
        yield (
            f"{judged.unknown_rewards:,} of {rec.recording.lengths.size:,} rewards are missing or outside of "
            f"assumptions.reward_range [{span[0]:g}, {span[1]:g}] and count as the worst possible value; record all "
            f"rewards, and correct the range"
        )
    if rec.sampling:
        yield "sampled with " + ", ".join(f"{name} {'/'.join(map(str, of))}" for name, of in rec.sampling.items())
    for of in judged.causes:
        share = f"{100 * of.share:.3g} %"
        yield f"{of.clause}: {share} was sampled by older weights and is not held against the kernels; {of.text}"
    if judged.age_note:
        yield judged.age_note
    if note := judged.prompts_note(contract):
        yield note


def _badness(finding: GateFinding) -> tuple[int, bool, float, str, str, str]:
    verdict = finding.verdict
    bound = verdict.lower if verdict.status is Status.FAIL else verdict.upper
    over = bound / verdict.limit if verdict.limit > 0 else bound - verdict.limit
    cell = verdict.cell
    rank = list(_MARK).index(verdict.status)
    return rank, not finding.required, 0.0 if math.isnan(over) else -over, cell.clause, cell.slice, finding.input.name


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor >= 0.01 or factor == 0 else f"{factor:.1g} times"


def headline(gate: OfflineGate) -> str:
    """The decision in one sentence: the slice that is hurt most, and by how much."""
    version, found = f"{gate.inference.engine} {gate.inference.fingerprint}", findings(gate)
    contract = f"{gate.contract.name} v{gate.contract.metadata.version}"
    if gate.decision.outcome is GateOutcome.ROLLBACK:
        worst, failed = found[0].verdict, sum(finding.verdict.status is Status.FAIL for finding in found)
        more = f"; {failed} verdicts failed in all" if failed > 1 else ""
        return (
            f"{version} breaks {contract}: {worst.cell.clause} on {named_place(worst.cell.slice)} is "
            f"{how_far(worst)} of {worst.limit:.4g}{more}"
        )
    if gate.decision.outcome is GateOutcome.WAIT:
        return f"{version} cannot be decided under {contract}: {_waits_for(gate, found)}"
    unjudged = f"; not judged: {', '.join(clause.clause for clause in gate.unjudged)}" if gate.unjudged else ""
    if others := sum(finding.verdict.status is not Status.PASS for finding in found):
        do = "verdicts do" if others > 1 else "verdict does"
        return (
            f"{version} keeps the required part of {contract}; {others} other {do} not PASS, so a promotion does not "
            f"accept this evidence{unjudged}"
        )
    return f"{version} keeps {contract} and may go on to {gate.decision.stage}{unjudged}"


def _clause(contract: Contract, id: str) -> Clause:
    return next(clause for clause in contract.clauses if clause.id == id)


def _waits_for(gate: OfflineGate, found: Sequence[GateFinding]) -> str:
    required = [finding.verdict for finding in found if finding.required]
    above = [verdict for verdict in required if verdict.status is not Status.FAIL and verdict.lower > verdict.limit]
    open_ = sum(verdict.status is not Status.PASS for verdict in required)
    said = f"{open_} of {len(required)} verdicts do not PASS yet" if open_ else missing(gate)[0]
    for worst in sorted(above, key=lambda verdict: verdict.limit - verdict.lower)[:1]:
        clause = _clause(gate.contract, worst.cell.clause)
        few = samples_needed(clause, gate.contract.observability) - worst.samples
        few *= not any(judged.age_unknown for judged in gate.judged)  # no number makes a FAIL
        unit = clause.quantity.per if clause.quantity is not None else Unit.TOKEN
        more = f"; a FAIL requires {few:,} more {unit}{'s' * (few != 1)}" if few > 0 else ""
        far = how_far(replace(worst, status=Status.FAIL))
        said += (
            f", and {worst.cell.clause} on {named_place(worst.cell.slice)} is {far} of {worst.limit:.4g} so far{more}"
        )
    return said


def lines(gate: OfflineGate) -> Iterator[str]:
    """Yield what follows the headline: verdicts that did not PASS, what is not judged or missing, and notes."""
    found, several = findings(gate), len(gate.inputs) > 1
    yield from _decided(gate, found, several=several)
    yield from _without_data(found, several=several)
    passed = sum(finding.verdict.status is Status.PASS for finding in found)
    yield f"PASS: {passed} verdict{'s' * (passed != 1)}"
    yield from (f"verdicts {scope}" for scope in scopes({of.verdict.cell.clause: of.verdict.about for of in found}))
    held = [reason.removeprefix("held: ") for reason in gate.decision.missing]
    for cell in gate.unjudged:
        yield f"not judged: {next((said for said in held if said.startswith(str(cell))), cell)}"
    for reason in missing(gate):
        if "windows have passed" in reason or reason.startswith("held: logits") or reason.endswith("no verdict"):
            yield reason
    yield from (f"note: {note}" for note in notes(gate))


def _decided(gate: OfflineGate, found: Sequence[GateFinding], *, several: bool) -> Iterator[str]:
    for finding in found:
        verdict = finding.verdict
        if verdict.status in {Status.PASS, Status.NO_DATA}:
            continue
        where = f"{verdict.cell.clause} on {named_place(verdict.cell.slice)}" + f" in {finding.input.name}" * several
        optional = "" if finding.required else " (not required)"
        far = f"; {how_far(verdict)}" if verdict.status is Status.FAIL else ""
        yield f"{verdict.status}{optional} {where}: {verdict.reason}{far}"
        if verdict.status is Status.INCONCLUSIVE:
            clause = _clause(gate.contract, verdict.cell.clause)
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
        if finding.verdict.status is Status.NO_DATA
    ]
    slices = together(((about, reason, verdict.cell.clause), verdict.cell.slice) for about, reason, verdict in rows)
    alike = together(((about, reason, tuple(on)), clause) for (about, reason, clause), on in slices.items())
    for ((optional, file), reason, on), clauses in alike.items():
        where = named_place(on[0]) if len(on) == 1 else f"slices {listed(on)}"
        why = reason.replace(_UNNAMED_SLICE, f"slice {on[0]}") if len(on) == 1 else reason
        yield f"NO_DATA{optional} {listed(clauses)} on {where}{file}: {why}"


def markdown(gate: OfflineGate) -> str:
    """The gate as a Markdown document: the decision, the verdicts worst first, the report's lines, what it rests on."""
    found = findings(gate)
    rows = [_row(gate, finding) for finding in found[:_MAX_ROWS]]
    heads = ("", "Clause", "For", "Observed", "Interval", "Limit", "From", "Recording")
    table = ["| " + " | ".join(row) + " |" for row in (heads, ("---",) * len(heads), *rows)]
    if len(found) > _MAX_ROWS:
        table += ["", f"and {len(found) - _MAX_ROWS} more"]
    text = [f"## {_OUTCOME_MARK[gate.decision.outcome]} {safe(headline(gate))}", "", *table, ""]
    text += [f"- {safe(line.strip())}" for line in lines(gate)]
    text += [f"- contract {safe(gate.contract.name)} v{gate.contract.metadata.version}, `{gate.contract.hash}`"]
    for side, kernel in (("training", gate.train), ("inference", gate.inference)):
        fields = ", ".join(f"{name} {value}" for name, value in kernel.to_plain().items())
        text.append(f"- {side} kernel `{kernel.fingerprint}`: {safe(fields)}")
    for about in gate.inputs:
        counts = f"{about.recording.lengths.size:,} sequences, {about.recording.train.size:,} tokens"
        text.append(f"- {safe(about.name)}: {counts}, sha256 `{about.sha256}`")
    confidence = 100 * gate.contract.observability.confidence
    return "\n".join([*text, f"- confidence {confidence:g}%{_MARKDOWN_END}", ""])


def is_report(text: str) -> bool:
    """Return whether a file's text is what `junit` or `markdown` gives."""
    return f'<testsuites name="{_JUNIT_NAME}' in text or (text.startswith("## ") and _MARKDOWN_END in text)


def _row(gate: OfflineGate, finding: GateFinding) -> tuple[str, ...]:
    verdict = finding.verdict
    quantity = _clause(gate.contract, verdict.cell.clause).quantity
    unit = Unit.TOKEN if quantity is None else quantity.per
    upper = f"{verdict.upper:.3g}" if math.isfinite(verdict.upper) else "none"
    numbers = f"{verdict.estimate:.4g}", f"{verdict.lower:.3g} to {upper}"
    there = math.isfinite(verdict.estimate)
    return (
        _MARK[verdict.status] + ("" if finding.required else " (not required)"),
        safe(verdict.cell.clause),
        safe(named_place(verdict.cell.slice)),
        *(numbers if there else ("-", "-")),
        f"{verdict.limit:.4g}",
        f"{verdict.samples:,} {unit}{'s' * (verdict.samples != 1)}" if there else "nothing",
        safe(finding.input.name),
    )


def safe(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return _MARKDOWN_CHARACTERS.sub(r"\\\1", text.replace("\n", " "))


def junit(gate: OfflineGate) -> str:
    """The gate as an XML document: a suite for each recording, and one of the clauses that none can be judged by."""
    name = gate.contract.name
    suites = {
        PurePosixPath(about.name).name: [
            (f"{of.verdict.cell.clause} on {of.verdict.cell.slice}", of.verdict.cell.clause, *_result(of.verdict))
            for of in findings(gate)
            if of.input is about
        ]
        for about in gate.inputs
    }
    if gate.unjudged:
        suites["not judged"] = [(of.clause, of.clause, "skipped", f"not judged: {of.why}") for of in gate.unjudged]
    root = ET.Element("testsuites", name=_text(f"{_JUNIT_NAME}{name}"))
    for title, cases in suites.items():
        suite = ET.SubElement(root, "testsuite", name=_text(f"{name}: {title}"))
        for case, clause, result, message in cases:
            element = ET.SubElement(suite, "testcase", classname=_text(f"{name}.{clause}"), name=_text(case), time="0")
            if result:
                ET.SubElement(element, result, message=_text(message))
    for element in (root, *root):
        counts = {"tests": "testcase", "failures": "failure", "skipped": "skipped"}
        element.attrib.update({key: str(len(element.findall(f".//{tag}"))) for key, tag in counts.items()})
        element.attrib.update(errors="0", time="0")
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _result(verdict: Verdict) -> tuple[str, str]:
    """Return the element of a case, none for a PASS, and its message."""
    if verdict.status is Status.FAIL:
        return "failure", f"{verdict.reason}; {how_far(verdict)}"
    return "" if verdict.status is Status.PASS else "skipped", f"{verdict.status}: {verdict.reason}"


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
