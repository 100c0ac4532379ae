"""Common parts of all dashboards: variables, links between them, marks of new kernel versions, their text form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.registry.own_metrics import METRICS, label, metric, selector
from kc_otel.contract.slices import ALL
from kc_otel.generate.files import HEALTH_UID, OVERVIEW_UID, PROMOTION_UID, RL_UID, SLICE_UID, GeneratedFile
from kc_otel.generate.grafana import sdk
from kc_otel.generate.grafana.panels import legend, link, reference
from kc_otel.generate.grafana.queries import by, minimum_step, picked

STEP: Final = "${step}s"
"""Smallest step of queries of what recorders send; a board with such queries needs the variable `step()`."""

_NOTICE: Final = "Written by `kc-otel generate grafana`; it fits every contract."
_TITLES: Final = {
    OVERVIEW_UID: "Overview",
    SLICE_UID: "Slice",
    RL_UID: "RL",
    PROMOTION_UID: "Promotion and routing",
    HEALTH_UID: "Health",
}
_LINE_CHARACTERS: Final = 120
_KERNEL_FIELDS: Final = ("engine", "engine.version", "dtype", "quantization", "kv_cache_dtype", "attention", "hardware")


def board_file(uid: str, about: str, variables: Iterable[Any], contents: Iterable[Any]) -> GeneratedFile:
    """A dashboard that links to all others and marks incidents and where kernel versions change."""
    board = (
        sdk.dashboard.Dashboard(f"Kernel contracts: {_TITLES[uid].lower() if uid != RL_UID else _TITLES[uid]}")
        .uid(uid)
        .description(f"{about} {_NOTICE}")
        .tags(["kernel-contract"])
        .timezone("browser")
        .tooltip(sdk.models.DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("30s")
        .readonly()
    )
    where = "The Prometheus that scrapes the evaluator and takes the recorders' metrics from the Collector."
    for variable in (source("datasource", "Data source", "prometheus", where), *variables):
        board.with_variable(variable)
    for other, title in _TITLES.items():
        if other != uid:
            shown = link(title, f"/d/{other}").type(sdk.models.DashboardLinkType.LINK).icon("dashboard")
            board.link(shown.include_vars(True).keep_time(True).as_dropdown(False))
    for mark in (_incidents(), *_kernel_changes()):
        board.annotation(mark)
    title = "the first"
    try:
        for content in contents:
            (board.with_row if isinstance(content, sdk.dashboard.Row) else board.with_panel)(content)
            title = f"the one after {content.build().title!r}"
    except KeyError as error:
        raise ValueError(f"board {uid}, panel: {title}: {error} is not in the registry") from error
    plain = json.loads(json.dumps(board.build(), cls=sdk.JSONEncoder))
    for shown in (*plain["links"], *plain["annotations"]["list"]):
        del shown["placement"]
    name = uid.removeprefix("kc-")
    return GeneratedFile(PurePosixPath("grafana", "dashboards", f"{name}.json"), f"{_json(plain)}\n")


def _json(value: Any, indent: int = 0) -> str:
    """JSON with as much on a line as fits, so that a board can be read and a change of it too."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent < _LINE_CHARACTERS or not isinstance(value, dict | list) or not value:
        return flat
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_json(item, indent + 2)}" for key, item in value.items()]
    else:
        parts = [_json(item, indent + 2) for item in value]
    lines: list[str] = []
    for part in parts:
        if lines and len(inner) + len(lines[-1]) + len(part) + 3 < _LINE_CHARACTERS and "\n" not in lines[-1] + part:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    body = f",\n{inner}".join(lines)
    return f"{opened}\n{inner}{body}\n{' ' * indent}{closed}"


def source(name: str, title: str, kind: str, about: str) -> Any:
    """A variable that picks a data source."""
    return sdk.dashboard.DatasourceVariable(name).label(title).type(kind).description(about)


def choice(name: str, title: str, about: str, query: str, *, single: bool = False, first: str = "") -> Any:
    """A variable whose values a query finds; a single one starts with `first`, one of many values with all."""
    variable = (
        sdk.dashboard.QueryVariable(name)
        .label(title)
        .description(about)
        .datasource(reference())
        .query({"query": query, "refId": f"{name}-values"})
        .definition(query)
        .refresh(sdk.models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(sdk.models.VariableSort.ALPHABETICAL_ASC)
        .multi(not single)
        .include_all(not single)
    )
    if not single:
        # Some clauses are about no pair of kernel versions, so "all" has to match the missing label too.
        variable.all_value(".*").current(sdk.models.VariableOption(True, ["All"], ["$__all"]))
    elif first:
        variable.current(sdk.models.VariableOption(True, first, first))
    return variable


def scope(*, slices: bool = True, single: Sequence[str] = ()) -> list[Any]:
    """The variables that pick contracts, slices and kernel versions; `single` names those that hold one value."""
    of_contract = f'{label("kc.contract")}=~"$contract"'
    verdict = metric("kc.verdict")
    wanted = [("contract", "Contract", "Kernel contracts that the evaluator judges.", verdict, "kc.contract", "")]
    if slices:
        about = f"Parts of the traffic that are judged on their own; `{ALL}` is the whole of it."
        wanted.append(("slice", "Slice", about, f"{verdict}{{{of_contract}}}", "kc.slice", ALL))
    for side, title in (("train", "Training"), ("inference", "Inference")):
        about = f"Versions of the {title.lower()} kernel, as fingerprints; the Health dashboard spells them out."
        of = f"{verdict}{{{of_contract}}}"
        wanted.append((f"kernel_{side}", f"{title} kernel version", about, of, f"kc.kernel.{side}", ""))
    return [
        choice(name, title, about, f"label_values({of}, {label(attribute)})", single=name in single, first=first)
        for name, title, about, of, attribute, first in wanted
    ]


def step() -> Any:
    """The hidden variable of the smallest step of rates of what recorders send, seconds."""
    about = "Seconds; a rate is over four of them, which hold three exports of the picked contracts' recorders."
    found = choice("step", "Smallest step", about, f"query_result({minimum_step()})", single=True, first="30")
    return found.regex("/ ([0-9]+) /").hide(sdk.models.VariableHide.HIDE_VARIABLE)


def _kernel_changes() -> list[Any]:
    """Marks on every graph: kernel pairs judged for the first time, and kernels that report, where the other is not."""
    pair, of = ("kc.contract", "kc.kernel.train", "kc.kernel.inference"), picked(("kc.contract",))
    kernel = ("kc.contract", "kc.kernel.role", "kc.kernel.version", *(f"kc.kernel.{field}" for field in _KERNEL_FIELDS))
    judged, reported = selector("kc.verdict", None, *of), selector("kc.kernel.info", None, *of)
    spelled = " ".join(legend(f"kc.kernel.{field}") for field in _KERNEL_FIELDS)
    return [
        _mark(
            "Kernel versions judged",
            f"{by(pair, judged, 'group')} unless {by(pair, f'{judged} offset 5m', 'group')}",
            f"{legend('kc.contract')}: first verdict on training kernel {legend('kc.kernel.train')} "
            f"against inference kernel {legend('kc.kernel.inference')}",
            "purple",
        ),
        _mark(
            "Kernel versions reported",
            f"{by(kernel, reported, 'group')} unless {by(kernel, f'{reported} offset 5m', 'group')}",
            f"{legend('kc.contract')}: {legend('kc.kernel.role')} kernel {legend('kc.kernel.version')}: {spelled}",
            "blue",
        ),
    ]


def _incidents() -> Any:
    of = METRICS["kc.incident"].attributes
    contract, id, on, train, inference = map(legend, of)
    lasting = by(of, selector("kc.incident", None, *picked(("kc.contract",))))
    text = f"{contract}: {on}, training kernel {train} against inference kernel {inference}; incident {id}"
    return _mark("Incidents", lasting, text, "red")


def _mark(name: str, expression: str, text: str, colour: str) -> Any:
    """Marks wherever an expression finds something; Grafana joins those that follow each other into one range."""
    return (
        sdk.dashboard.AnnotationQuery()
        .name(name)
        .datasource(reference())
        .enable(True)
        .icon_color(colour)
        .expr(expression)
        .step("60s")
        .title_format(name)
        .text_format(text)
        .target(sdk.prometheus.Dataquery().ref_id("Anno").expr(expression).range())
    )
