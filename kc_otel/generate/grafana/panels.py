"""Panels as JSON of Grafana's classic dashboards: one function per kind, with the choices that all of its panels share.

Further keywords of a panel are defaults of its fields, such as `decimals` or `mappings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kc_otel.contract.prometheus_names import label
from kc_otel.judge.verdict import Status

Json = dict[str, Any]

DATASOURCE: Final = "${datasource}"
SAME_TIME: Final = "${__url_time_range}"
"""Grafana's name for the time range that is looked at, in an address."""
STATUS_COLOURS: Final = {
    Status.PASS: "#1a7340",
    Status.INCONCLUSIVE: "#8a5a00",
    Status.NO_DATA: "#7a3ea8",
    Status.FAIL: "#c01c28",
    Status.INVALID_INPUT: "#7a3ea8",
}
"""Those of the evaluator's page, on which white can be read."""
STATUS_SHAPES: Final = {
    Status.PASS: "✓",
    Status.INCONCLUSIVE: "?",
    Status.NO_DATA: "○",
    Status.FAIL: "✕",
    Status.INVALID_INPUT: "⊘",
}
"""Those of the evaluator's page: a state is never told by its colour alone."""
LEGEND: Final = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}


def target(expression: str, legend: str = "", *, exemplar: bool = False, step: str = "") -> Json:
    """One query of a panel; `step` is the smallest where data comes seldom, `exemplar` shows observations."""
    optional = {"legendFormat": legend, "exemplar": exemplar, "interval": step}
    return {"expr": expression, **{name: value for name, value in optional.items() if value}}


def mapping(options: Mapping[str, tuple[str, str]]) -> Json:
    """A value mapping from value to text and colour."""
    results = {
        value: {"text": text, "color": colour, "index": index}
        for index, (value, (text, colour)) in enumerate(options.items())
    }
    return {"type": "value", "options": results}


def status_mapping() -> Json:
    """Codes of the metric `kc.verdict` to shapes, names and colours."""
    return mapping(
        {str(status.code): (f"{STATUS_SHAPES[status]} {status}", STATUS_COLOURS[status]) for status in Status}
    )


def thresholds(base: str, *steps: tuple[float, str]) -> Json:
    """Colours from `base` upwards: each step is the value at which its colour begins."""
    return {
        "mode": "absolute",
        "steps": [{"value": value, "color": colour} for value, colour in ((None, base), *steps)],
    }


def override(panel: Json, name: str, values: Mapping[str, object], matcher: str = "byName") -> None:
    """Set properties of the fields of one name, or of those that match a regular expression."""
    properties = [{"id": id, "value": value} for id, value in values.items()]
    panel["fieldConfig"]["overrides"].append({"matcher": {"id": matcher, "options": name}, "properties": properties})


MARGIN: Final[Mapping[str, object]] = {
    "unit": "percentunit",
    "decimals": 1,
    "thresholds": thresholds("red", (0.0, "yellow"), (0.2, "green")),
    "custom.cellOptions": {"type": "color-text"},
}
"""Column of a table with margins as shares of limits: red beyond the limit, yellow near it."""


def legend(*attributes: str) -> str:
    """Template of a series' name, or of a mark's text: the values of these attributes."""
    return " · ".join(f"{{{{{label(name)}}}}}" for name in attributes)


def link(title: str, url: str, *, keep: bool = False) -> Json:
    """A link of a board or of a panel's values, which may keep variables and time."""
    return {
        "title": title, "type": "link", "icon": "dashboard" * keep, "url": url, "includeVars": keep, "keepTime": keep,
        "asDropdown": False, "targetBlank": False, "tags": [], "tooltip": "",
    }  # fmt: skip


def reference(kind: str = "prometheus", uid: str = DATASOURCE) -> Json:
    """A data source that a variable picks."""
    return {"type": kind, "uid": uid}


def count(
    id: int, title: str, about: str, query: str, colour: str, base: str = "green", span: int = 3, **defaults: Any
) -> Json:
    """A count: `base` is the colour of zero, `colour` that of anything above it."""
    defaults = {"decimals": 0, "thresholds": thresholds(base, (1e-9, colour)), **defaults}
    return state(id, title, about, query, span=span, **defaults)


def state(
    id: int,
    title: str,
    about: str,
    query: str,
    *,
    legend: str = "",
    span: int = 3,
    coloured: bool = True,
    text: str = "value",
    **defaults: Any,
) -> Json:
    """One value, large, on the colour of its threshold or mapping; where several series match, the largest."""
    options = {
        "graphMode": "none",
        "colorMode": "background" if coloured else "none",
        "justifyMode": "auto",
        "textMode": text,
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"]},
    }
    defaults = {"unit": "none", "thresholds": thresholds("text"), "noValue": "unknown", **defaults}
    defaults["color"] = {"mode": "thresholds"}
    return panel("stat", id, title, about, [target(query, legend)], 4, span, options, instant=True, **defaults)


def table(
    id: int,
    title: str,
    about: str,
    columns: Mapping[str, str],
    labels: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, object]],
    *,
    sort: Sequence[tuple[str, bool]] = (),
    hide: Sequence[str] = (),
    order: Sequence[str] = (),
    height: int = 10,
    **defaults: Any,
) -> Json:
    """A table with a row per set of labels.

    Value columns, by title, are PromQL joined on the labels; `labels` are the titles of their columns, and `overrides`
    properties by column title. Rows are sorted by titles, and by whether the largest come first; fields of `hide` are
    left out. The first value column stands left of the labels, unless `order` says otherwise.
    """
    values = {value_field(index) if len(columns) > 1 else "Value": name for index, name in enumerate(columns)}
    values = {field: name for field, name in values.items() if field not in hide}
    titles = {**values, **labels}
    places = [*list(values)[:1], *labels, *list(values)[1:]]
    if order:
        places.sort(key=lambda name: order.index(titles[name]))
    shown = {
        "excludeByName": dict.fromkeys(("Time", *hide), True),
        "indexByName": {name: index for index, name in enumerate(places)},
        "renameByName": titles,
    }
    made = panel(
        "table", id, title, about, map(target, columns.values()), height, 24, table_options(sort), instant=True,
        custom=FILTERABLE, **defaults,
    )  # fmt: skip
    for asked in made["targets"]:
        asked["format"] = "table"
    made["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": shown}]
    for name, properties in overrides.items():
        override(made, name, properties)
    return made


FILTERABLE: Final = {"align": "auto", "inspect": False, "filterable": True}
"""Fields of a table whose columns can be filtered."""


def table_options(sort: Sequence[tuple[str, bool]]) -> Json:
    """Options of a table, sorted by titles, and by whether the largest come first."""
    return {
        "frameIndex": 0,
        "showHeader": True,
        "showTypeIcons": False,
        "cellHeight": "sm",
        "sortBy": [{"displayName": title, "desc": down} for title, down in sort],
    }


def value_field(index: int) -> str:
    """Grafana's name of the values of a table's query, by its place from 0, where it has several queries."""
    return f"Value #{_ref(index)}"


def timeline(
    id: int,
    title: str,
    about: str,
    targets: Iterable[Json],
    mappings: Json,
    base: str,
    height: int = 9,
    span: int = 24,
    **defaults: Any,
) -> Json:
    """A band per series that changes colour with its state, and says it in words wherever there is room."""
    options = {
        "mergeValues": True,
        "alignValue": "left",
        "showValue": "auto",
        "rowHeight": 0.85,
        "perPage": 20,
        "legend": LEGEND,
        "tooltip": {"mode": "single", "sort": "asc"},
    }
    defaults |= {"mappings": [mappings], "thresholds": thresholds(base), "color": {"mode": "thresholds"}}
    custom = {"lineWidth": 0, "fillOpacity": 80}
    return panel("state-timeline", id, title, about, targets, height, span, options, custom=custom, **defaults)


def verdicts(id: int, title: str, about: str, targets: Iterable[Json], height: int = 9, span: int = 24) -> Json:
    """A timeline of verdicts, by the codes of `kc.verdict`."""
    return timeline(id, title, about, targets, status_mapping(), STATUS_COLOURS[Status.PASS], height, span)


def graph(
    id: int, title: str, about: str, targets: Iterable[Json], unit: str, height: int = 8, span: int = 8, **defaults: Any
) -> Json:
    """Lines over time. A zero axis is not forced: drift is read against its limit."""
    options = {"legend": LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}}
    defaults = {"unit": unit, "thresholds": thresholds("green"), "color": {"mode": "palette-classic"}, **defaults}
    custom = {"lineWidth": 1, "fillOpacity": 0, "showPoints": "never", "spanNulls": False}
    return panel("timeseries", id, title, about, targets, height, span, options, custom=custom, **defaults)


def with_limit(graph: Json, pattern: str = "/ limit$/") -> Json:
    """A graph whose series of these names are drawn as limits: dashed and red."""
    red = {"color": {"mode": "fixed", "fixedColor": "red"}}
    override(graph, pattern, {**red, "custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}, "byRegexp")
    return graph


def in_unit(shown: Json, units: str) -> Json:
    """A panel whose numbers are in the unit that a query finds, under the label `kc_clause_unit`."""
    asked = {**target(units), "instant": True, "range": False, "format": "table", "refId": "Unit"}
    shown["targets"].append(asked)
    mapped = {"fieldName": label("kc.clause.unit"), "handlerKey": "unit"}
    found = {"configRefId": "Unit", "mappings": [mapped]}
    shown["transformations"].append({"id": "configFromData", "options": found})
    return shown


def panel(
    kind: str,
    id: int,
    title: str,
    about: str,
    targets: Iterable[Json],
    height: int,
    span: int,
    options: Json,
    *,
    instant: bool = False,
    **defaults: Any,
) -> Json:
    """A panel of any kind; its board places it."""
    asked = [
        {**target, "instant": instant, "range": not instant, "refId": _ref(index)}
        for index, target in enumerate(targets)
    ]
    return {
        "type": kind,
        "id": id,
        "title": title,
        "description": about,
        "datasource": reference(),
        "gridPos": {"h": height, "w": span},
        "targets": asked,
        "transformations": [],
        "options": options,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }


def row(id: int, title: str, *panels: Json) -> Json:
    """A heading; panels of its own are folded away."""
    shape = {"h": 1, "w": 24}
    return {
        "type": "row", "id": id, "title": title, "collapsed": bool(panels), "panels": [*panels], "gridPos": shape,
    }  # fmt: skip


def _ref(index: int) -> str:
    return chr(ord("A") + index)
