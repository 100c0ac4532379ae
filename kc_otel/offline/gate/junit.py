"""An offline gate as JUnit XML: a test case per clause, slice and recording.

The elements and attributes are those on which the readers of CI systems agree: `testsuites`, `testsuite` with counts,
`properties`, `testcase` with at most one of `failure` and `skipped`. An undecided clause is skipped, with the missing
data as its message; the exit code tells a gate that waits from one that opens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Final
from xml.etree import ElementTree as ET

from kc_otel.judge.verdict import Status
from kc_otel.offline.gate.findings import GateFinding, findings, how_far
from kc_otel.offline.gate.recorded_gate import OfflineGate

_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(gate: OfflineGate) -> str:
    """The gate as an XML document: one suite per recording, and one of the clauses that none can be judged by."""
    root = ET.Element("testsuites", name=_text(f"kernel contract {gate.contract.name}"))
    found = findings(gate)
    suites = [
        _suite(gate, about.name, [_judged(gate, finding) for finding in found if finding.input is about])
        for about in gate.inputs
    ]
    if gate.unjudged:
        skipped = [_case(gate, clause.clause, clause.clause) for clause in gate.unjudged]
        for case, clause in zip(skipped, gate.unjudged, strict=True):
            ET.SubElement(case, "skipped", message=_text(f"not judged: {clause.why}"))
        suites.append(_suite(gate, "not judged", skipped))
    for place, suite in enumerate(suites):
        suite.set("id", str(place))
        root.append(suite)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in suites)))
    root.set("time", "0")
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _judged(gate: OfflineGate, finding: GateFinding) -> ET.Element:
    verdict = finding.verdict
    case = _case(gate, verdict.cell.clause, f"{verdict.cell.clause} on {verdict.cell.slice}")
    if verdict.status is Status.FAIL:
        about = ET.SubElement(case, "failure", message=_text(f"{verdict.reason}; {how_far(verdict)}"), type="FAIL")
        about.text = _text(
            f"estimate {verdict.estimate:.6g}, between {verdict.lower:.6g} and {verdict.upper:.6g}, limit "
            f"{verdict.limit:.6g}, {verdict.samples:,} observations, {verdict.method}, {finding.input.name}"
        )
    elif verdict.status is not Status.PASS:
        ET.SubElement(case, "skipped", message=_text(f"{verdict.status}: {verdict.reason}"))
    return case


def _case(gate: OfflineGate, clause: str, name: str) -> ET.Element:
    return ET.Element("testcase", classname=_text(f"{gate.contract.name}.{clause}"), name=_text(name), time="0")


def _suite(gate: OfflineGate, name: str, cases: Sequence[ET.Element]) -> ET.Element:
    suite = ET.Element(
        "testsuite",
        name=_text(f"{gate.contract.name}: {PurePosixPath(name).name}"),
        package=_text(gate.contract.name),
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors="0",
        skipped=str(sum(case.find("skipped") is not None for case in cases)),
        time="0",
        timestamp=datetime.fromtimestamp(gate.at, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        hostname="localhost",
    )
    about = {
        "recording": name,
        "decision": gate.decision.outcome.value,
        "contract.version": str(gate.contract.metadata.version),
        "contract.hash": gate.contract.hash,
        "kernel.train": gate.train.fingerprint,
        "kernel.inference": gate.inference.fingerprint,
    }
    properties = ET.SubElement(suite, "properties")
    for key, value in about.items():
        ET.SubElement(properties, "property", name=key, value=_text(value))
    suite.extend(cases)
    ET.SubElement(suite, "system-out")
    ET.SubElement(suite, "system-err")
    return suite


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
