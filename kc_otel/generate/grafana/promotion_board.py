"""The Promotion and routing dashboard: which kernel serves what, what is held back, and what a gate would see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.registry.own_metrics import METRICS, label
from kc_otel.generate.files import PROMOTION_UID, STAGE_ID, GeneratedFile
from kc_otel.generate.grafana import panels, queries
from kc_otel.generate.grafana.boards import board_file, scope
from kc_otel.generate.grafana.panels import legend, mapping, target
from kc_otel.judge.verdict import Status

_STAGES: Final = {
    "-2": ("rolled back, measured", "dark-red"),
    "-1": ("rolled back", "red"),
    "0": ("offline CI", "text"),
    "1": ("shadow", "purple"),
    "2": ("canary", "yellow"),
    "3": ("full", "green"),
}


def promotion_file() -> GeneratedFile:
    """The dashboard; it is the same for all contracts."""
    about = "Which kernel serves which slice, what is held back, and the evidence for a gate."
    return board_file(PROMOTION_UID, about, scope(), _panels())


def _panels() -> Iterator[Any]:
    yield panels.timeline(
        10,
        "Routes over time",
        "Which kernel the decision table sends each slice to instead of a version. A route stays after its alert "
        "has resolved, until a person resumes the slice.",
        (target(queries.ROUTES, legend(*queries.ROUTE)),),
        mapping({"0": ("inference kernel", "blue"), "1": ("training kernel", "purple")}),
        "blue",
        height=8,
    )
    yield from _stages()
    pair, of, passes = legend(*queries.PAIR), queries.labels(queries.PAIR), Status.PASS.code
    worst = queries.by(queries.PAIR, queries.cells("kc.verdict"))
    margin = queries.by(queries.PAIR, queries.margin_share(), "min")
    passing = f"{worst} == bool {passes}"
    version = queries.PAIR[0], queries.PAIR[2]
    entered = queries.cells("kc.promotion.since", attributes=version)
    yield panels.table(
        12,
        "Evidence by kernel version",
        "What a promotion gate looks at, over all picked clauses and slices. PASS since: when the last of them became "
        "PASS; empty while one is not. The share of the range in PASS counts minutes in which every cell passed.",
        {
            "Worst verdict": worst,
            "PASS since": f"{queries.by(queries.PAIR, queries.since())} and on ({of}) {worst} == {passes}",
            "In its stage since": f"0 * {worst} + on ({queries.labels(version)}) group_left () (1000 * {entered})",
            "Share of the range in PASS": f"(avg_over_time(({passing})[$__range:1m]) or ({passing})) and {worst}",
            "Smallest margin": margin,
            "Fewest samples": queries.by(queries.PAIR, queries.cells("kc.bound.samples", how="min"), "min"),
            "Cells": queries.by(queries.PAIR, queries.cells("kc.verdict"), "count"),
        },
        dict(zip(map(label, queries.PAIR), ("Contract", "Training kernel", "Inference kernel"), strict=True)),
        {
            "Worst verdict": {
                "custom.cellOptions": {"type": "color-background"},
                "mappings": [panels.status_mapping()],
            },
            "PASS since": {"unit": "dateTimeFromNow", "noValue": "not now"},
            "In its stage since": {"unit": "dateTimeFromNow"},
            "Share of the range in PASS": {"unit": "percentunit", "decimals": 1},
            "Smallest margin": panels.MARGIN,
            "Fewest samples": {"unit": "short"},
        },
        sort=(("Worst verdict", True),),
        height=8,
    )
    about = (
        "All picked clauses and slices together, for each contract, training kernel and inference kernel: green "
        "throughout is what opens a gate."
    )
    yield panels.verdicts(13, "Worst verdict of each kernel version over time", about, (target(worst, pair),), height=8)
    about = (
        "Distance from the bound that decides to the limit, as a share of the limit, of the clause and slice that "
        "has least of it. Below zero it is broken, or not shown to be kept."
    )
    yield panels.graph(
        14, "Smallest margin of each kernel version", about, (target(margin, pair),), "percentunit", span=24
    )


def _stages() -> Iterator[Any]:
    attributes = ("kc.contract", "kc.kernel.inference")
    version = legend(*attributes)
    about = (
        "Where an inference kernel's version is on its way to full traffic: offline CI, shadow, canary, full, or "
        "rolled back, and then whether it was measured after that. Empty where the evaluator keeps no promotion."
    )
    shown = (target(queries.cells("kc.promotion.stage", attributes=attributes), version),)
    yield panels.timeline(
        STAGE_ID, "Stage of each kernel version", about, shown, mapping(_STAGES), "text", height=8, span=8
    )
    for id, title, name, unit, about in (
        (17, "Share of requests it may serve", "kc.promotion.share", "percentunit", "It grows step by step in canary."),
        (18, "Windows of PASS in a row", "kc.promotion.windows", "none", "Towards what the next gate asks for."),
    ):
        shown = target(queries.cells(name, attributes=attributes), version)
        yield panels.graph(id, title, f"{METRICS[name].meaning} {about}", (shown,), unit)
