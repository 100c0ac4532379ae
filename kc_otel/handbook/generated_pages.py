"""Pages of the handbook that are made while it is built, from what they describe, so that none of them can be stale.

MkDocs calls the functions `on_*`; the others return Markdown and can be called by anybody. Fields come from the
contract's model and the comments on it, metrics and attributes from the registry, input checks from their reasons,
commands from the command line itself, the HTTP API from its OpenAPI document, Python from docstrings.
"""

from __future__ import annotations

import math
import pkgutil
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.registry import ATTRIBUTES, DERIVED, METRICS, QUANTITIES, RECORDED, Origin, Quantity, Unit
from kc_otel.record.measure.reasons import REASONS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PYTHON_PACKAGES: Final = {
    "kc_otel": "Contracts and the recorder",
    "kc_otel.integrations": "Engines and trainers",
    "kc_otel.client": "Serving processes and receivers",
    "kc_otel.stats": "Mathematics",
}
"""What programs import, with headings; the other rooms are reached by commands."""
PYTHON_MODULES: Final = ("kc_otel.integrations", "kc_otel.client")
"""Those of them whose modules are imported by name; the others export at their top."""

_FIELDS: Final = """\
Made from the model that reads contracts; [the language](index.md) says how the parts play together. A key that is not
here is refused, with file and line. `kc-otel schema` prints the same for your editor."""
_QUANTITIES: Final = """\
What a clause's `metric:` can be, made from the registry; `kc-otel metrics` prints it. P is the training kernel, Q the
inference kernel, w = P(y)/Q(y) the importance ratio of a token y that Q sampled, l = log w; W and L are those of a
whole sequence. Any `gen_ai.*` histogram can be limited too, under `runtime`, in seconds."""
_ORIGINS: Final = {
    Origin.LOGPROBS: "Both kernels' log-probabilities of the sampled tokens: always there in RL, and in serving after "
    "[rescoring](../measure/vllm.md#score-them).",
    Origin.LOGITS: "Both kernels' full logits of the same positions: in tests and in offline gates.",
    Origin.ADVANTAGES: "Log-probabilities, and the advantages of the tokens.",
    Origin.TRUNCATION: "The training kernel's mass on the tokens that "
    "[top-p or top-k kept](../measure/own-loop.md#top-p-and-top-k).",
    Origin.REWARDS: "Log-probabilities, and the reward of each sequence.",
    Origin.OPERATORS: "Outputs of [single operators](../measure/operators.md); the clause names its `operator`.",
    Origin.RUNTIME: "What the programs say of themselves while they run.",
}
_CHECKS: Final = """\
Input is checked before anything is called drift. What fails a check is counted under its own name, in
`kc.input.invalid` and in `recorder.stats()`, and is never measured. A step of the policy can wait for it:
`on: invalid-input`. `kc-otel checks` prints this list. Of `reward_out_of_range` alone the sequence is measured, and its
reward is not used.

Measured all the same, and said once in the log: log-probabilities that one side alone kept in bfloat16 or float16.
Their rounding is a part of the difference; the line says which side, and how much of the mean |log ratio|. Keep them
in float32 on both sides."""
_TELEMETRY: Final = """\
Every metric and attribute that kc-otel sends or exposes, made from the registry that the code is checked against."""
_HISTOGRAMS: Final = """\
Exponential histograms, cumulative, with the attributes `kc.contract`, `kc.slice`, `kc.kernel.train`,
`kc.kernel.inference`, and `kc.operator` on those of operators. What each measures is in
[metrics](../contract/metrics.md)."""
_HTTP: Final = """\
The evaluator's API port, 4320 by default. `/openapi.json` on it describes the same for programs. There is no
authentication: it listens on loopback unless it is told otherwise."""
_PYTHON: Final = """\
Names that programs import, with their docstrings. Whatever is not here may change without notice."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - MkDocs is there when it is built, and only then

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Leaves out what no browser of an English site asks for: source maps, other languages' word lists, sitemaps."""
    site = Path(config.site_dir)
    for unused in (*site.rglob("*.map"), site / "sitemap.xml", site / "sitemap.xml.gz"):
        unused.unlink(missing_ok=True)
    shutil.rmtree(site / "assets/javascripts/lunr", ignore_errors=True)


def fields_page() -> str:
    """Every field of a contract: its kind, its default, its comment."""
    schema = Contract.model_json_schema(by_alias=True)
    return _page("Fields", _FIELDS, *_definitions({"Contract": schema, **schema["$defs"]}))


def metrics_page() -> str:
    """Every metric that a clause can name."""
    parts = [_QUANTITIES]
    for origin, needs in _ORIGINS.items():
        parts += [f"## From {origin}", needs]
        parts += [_quantity(quantity) for quantity in QUANTITIES.values() if quantity.source is origin]
    parts += [
        "## Derived",
        "A factor times the mean of a recorded metric; factors come from the contract's `assumptions`.",
    ]
    for derived in DERIVED.values():
        needed = f", needs `{'`, `'.join(derived.needs)}`" if derived.needs else ""
        about = f"From `{derived.base}`{needed}; unit `{derived.unit}`. Source: {derived.source_text}."
        parts += [f"### `{derived.key}`", derived.meaning, about]
    return _page("Metrics", *parts)


def input_checks_page() -> str:
    """Every reason for which a sequence is not measured."""
    reasons = (f"## `{name}`\n\n{each.meaning}\n\n**What to do.** {each.remedy}" for name, each in REASONS.items())
    return _page("Why a sequence is not measured", _CHECKS, *reasons)


def telemetry_page() -> str:
    """Every metric and attribute that is sent or exposed."""
    histograms = ((f"`{each.name}`", f"`{each.unit}`", str(each.per)) for each in RECORDED.values())
    parts = ["## Drift histograms", _HISTOGRAMS, _table(("metric", "unit", "one observation is a"), histograms)]
    parts.append("## Other metrics")
    for metric in METRICS.values():
        attributes = ", ".join(f"`{name}`" for name in metric.attributes) or "no attributes"
        about = f"{str(metric.instrument).capitalize()}, unit `{metric.unit}`; {attributes}."
        parts += [f"### `{metric.name}`", metric.meaning, about]
    attributes_of = ((f"`{each.name}`", ", ".join(each.on), each.meaning) for each in ATTRIBUTES.values())
    parts += ["## Attributes", _table(("attribute", "on", ""), attributes_of)]
    return _page("Telemetry", _TELEMETRY, *parts)


def commands_page() -> str:
    """Every command with its arguments and options."""
    import typer  # noqa: PLC0415 - of an extra

    from kc_otel import cli  # noqa: PLC0415

    cli._register()  # noqa: SLF001 - what `main` does before it reads the command line
    commands = _command(typer.main.get_command(cli.app), "kc-otel")
    return _page("Commands", "What `kc-otel COMMAND --help` prints, in one place.", *commands)


def http_api_page() -> str:
    """Every path of the evaluator's API."""
    from collections import Counter  # noqa: PLC0415

    from kc_otel.judge.otlp.sink import RequestCounts  # noqa: PLC0415 - the evaluator is of an extra
    from kc_otel.serve.api.app import make_api  # noqa: PLC0415
    from kc_otel.serve.api.changes import Changes  # noqa: PLC0415
    from kc_otel.serve.core import Core  # noqa: PLC0415
    from kc_otel.serve.self_metrics import read  # noqa: PLC0415
    from kc_otel.serve.store.state_file import open_state  # noqa: PLC0415

    core = Core([], open_state(None), external_url="", now=0.0)
    document = make_api(core, lambda: read(core, RequestCounts(), Counter()), Changes(), "0").openapi()
    parts = []
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            parts += [f"## `{method.upper()} {path}`", about.get("description", "").strip()]
            rows = [
                (f"`{each['name']}`", each["in"], _kind(each["schema"]), each.get("description", ""))
                for each in about.get("parameters", [])
            ]
            parts.append(_table(("parameter", "in", "kind", ""), rows))
    return _page("HTTP API", _HTTP, *parts)


def python_page() -> str:
    """What each public module offers; the docstrings are put in when the page is rendered."""
    parts = []
    for package, title in PYTHON_PACKAGES.items():
        parts.append(f"## {title}")
        for module in _modules(package):
            parts += [
                f"### `{module}`",
                f"::: {module}\n    options: {{show_root_heading: false, show_root_toc_entry: false}}",
            ]
    return _page("Python", _PYTHON, *parts)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "contract/fields.md": fields_page,
    "contract/metrics.md": metrics_page,
    "measure/input-checks.md": input_checks_page,
    "reference/telemetry.md": telemetry_page,
    "reference/commands.md": commands_page,
    "reference/http-api.md": http_api_page,
    "reference/python.md": python_page,
}
"""Path below `pages` -> its text."""


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", *filter(None, parts))) + "\n"


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; nothing where there are no rows."""
    lines = ["| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in row) + " |" for row in rows]
    head = "| " + " | ".join(headings) + " |"
    return "\n".join((head, re.sub(r"[^|]+", " --- ", head), *lines)) if lines else ""


def _quantity(quantity: Quantity) -> str:
    by_sequence = ", its mean by default per sequence" if quantity.per is Unit.TOKEN else ""
    low = f"({quantity.low:g}" if quantity.low == -math.inf else f"[{quantity.low:g}"
    high = f"{quantity.high:.3g})" if quantity.high == math.inf else f"{quantity.high:.3g}]"
    cap = f"Bounds on its mean are for the mean of min(value, {quantity.cap:g}); `cap` changes that."
    return (
        f"### `{quantity.key}`\n\n{quantity.meaning}\n\n"
        f"Default statistic `{quantity.statistic}`, observed per {quantity.per}{by_sequence}; values in {low}, {high}, "
        f"unit `{quantity.unit}`; recorded as `{quantity.name}`. {'' if quantity.cap == quantity.high else cap} "
        f"Source: {quantity.source_text}."
    )


def _definitions(definitions: dict[str, Any]) -> Iterator[str]:
    """A table of fields for each part of a contract, in the order in which a reader meets them."""
    waiting, seen = ["Contract"], {"Contract", "Action"}
    while waiting:
        name = waiting.pop(0)
        definition = definitions[name]
        required = set(definition.get("required", ()))
        rows = [
            (
                f"`{field}`",
                _kind(about),
                "**required**" if field in required else _default(about.get("default")),
                about.get("description", ""),
            )
            for field, about in definition["properties"].items()
        ]
        yield f"## {name}\n\n{definition.get('description', '').strip()}"
        yield _table(("field", "kind", "default", ""), rows)
        found = dict.fromkeys(re.findall(r"'#/\$defs/(\w+)'", repr(definition["properties"])))
        waiting += [each for each in found if each not in seen]
        seen |= set(found)


_NAMES: Final = {"string": "text", "integer": "whole number", "boolean": "true or false"}
_SIGNS: Final = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _kind(about: dict[str, Any]) -> str:
    """What a JSON Schema allows, in words."""
    if "$ref" in about:
        name = about["$ref"].rsplit("/", 1)[-1]
        kind = (
            f"[{name}](#{name.lower()})" if name not in {"Action", "IncidentState", "Stage", "Status"} else name.lower()
        )
    elif "const" in about:
        kind = f"`{about['const']}`"
    elif "enum" in about:
        kind = ", ".join(f"`{value}`" for value in about["enum"])
    elif "anyOf" in about:
        kind = " or ".join(_kind(each) for each in about["anyOf"] if each.get("type") != "null")
    elif "prefixItems" in about:
        kind = f"list of {len(about['prefixItems'])}: {_kind(about['prefixItems'][0])}"
    elif about.get("type") == "array":
        kind = f"list of {_kind(about['items'])}"
    elif about.get("type") == "object":
        inner = about.get("additionalProperties") or next(iter(about.get("patternProperties", {}).values()), None)
        kind = f"name to {_kind(inner)}" if isinstance(inner, dict) else "name to value"
    elif str(about.get("pattern", "")).startswith(r"^(\d+"):
        kind = "duration, such as `5m`"
    else:
        written = about.get("type", "value")
        kinds = [_NAMES.get(each, each) for each in ([written] if isinstance(written, str) else written)]
        limits = [f"{sign} {about[key]:g}" for key, sign in _SIGNS.items() if key in about]
        kind = " ".join((" or ".join(kinds), ", ".join(limits))).strip()
    return kind


def _default(default: Any) -> str:
    if isinstance(default, dict) or default in (None, "", [], False):
        return ""
    return f"`{', '.join(map(str, default))}`" if isinstance(default, list) else f"`{default}`"


def _command(command: Any, name: str) -> Iterator[str]:
    """A command and those below it, which have click's attributes whatever their classes are."""
    if subcommands := getattr(command, "commands", None):
        for below, each in subcommands.items():
            yield from _command(each, f"{name} {below}")
        return
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    placeholders = [str(each.metavar or each.name.upper()) for each in arguments]
    yield f"## {name}"
    yield f"`{' '.join([name, *placeholders])}`" if arguments else ""
    yield textwrap.dedent(command.help or "").strip()
    rows = [(f"`{shown}`", each.help or "", "") for shown, each in zip(placeholders, arguments, strict=True)]
    for each in options:
        default = (
            f"`{each.envvar}`" if isinstance(each.envvar, str) and each.default is None else _default(each.default)
        )
        rows.append((f"`{'`, `'.join(each.opts)}`", each.help or "", default))
    yield _table(("option", "", "default"), rows)


def _modules(package: str) -> Iterator[str]:
    """The package itself where it exports names, and its public modules where those are imported by name."""
    imported = import_module(package)
    if getattr(imported, "__all__", None):
        yield package
    if package in PYTHON_MODULES:
        yield from (f"{package}.{each.name}" for each in pkgutil.iter_modules(imported.__path__) if each.name[0] != "_")
