"""Write the reference pages of the handbook from what they describe, as `make generate` does."""

from __future__ import annotations

import math
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kc_otel.contract.input_reasons import REASONS
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, RECORDED, Origin, Quantity, Unit
from kc_otel.contract.registry.own_metrics import ATTRIBUTES, METRICS
from kc_otel.contract.units import format_duration

if TYPE_CHECKING:
    import griffe

FOLDER: Final = Path(__file__).parent / "pages"
PYTHON_PACKAGES: Final = {
    "kc_otel": "Public interface",
    "kc_otel.integrations": "Engines and trainers",
    "kc_otel.client": "Serving processes and receivers",
    "kc_otel.stats": "Mathematics",
}
_CLIENT_MODULES: Final = ("alive", "openfeature", "router", "training_log", "webhooks")
"""Modules that a service imports or a container runs; the others of `kc_otel.client` serve these and the commands."""

_ORIGINS: Final = {
    Origin.LOGPROBS: "Both kernels' log-probabilities of the sampled tokens: always available in RL, and after "
    "[rescoring](../measure/vllm.md#score) in serving.",
    Origin.LOGITS: "Both kernels' full logits of the same positions: in tests and in offline gates.",
    Origin.ADVANTAGES: "Log-probabilities, and the advantages of the tokens.",
    Origin.TRUNCATION: "The training kernel's mass on the tokens that "
    "[top-p or top-k kept](../reference/recorder.md#top-p-and-top-k).",
    Origin.REWARDS: "Log-probabilities, and the reward of each sequence.",
    Origin.OPERATORS: "Outputs of [single operators](../measure/operators.md); the clause names its `operator`.",
    Origin.RUNTIME: "Reported by the programs while they run.",
}
_HISTOGRAMS: Final = """\
Exponential histograms, cumulative, with the attributes `kc.contract`, `kc.slice`, `kc.kernel.train`,
`kc.kernel.inference`, and `kc.operator` on those of operators. [Metrics](../contract/metrics.md) defines each."""
_MARK: Final = "<!-- What follows is written by `make generate`. -->"


def main() -> None:
    """Write the generated part of every page."""
    for path in PAGES:
        (FOLDER / path).write_text(page(path), encoding="utf-8")


def page(path: str) -> str:
    """A page with what a person wrote above the mark, and below it what is generated."""
    written, mark, _ = (FOLDER / path).read_text(encoding="utf-8").partition(f"{_MARK}\n")
    assert mark, f"{path} has no line {_MARK}"
    return "\n\n".join((f"{written}{_MARK}", *filter(None, PAGES[path]()))) + "\n"


def fields_page() -> Iterable[str]:
    """Every field of a contract: its kind, its default, its comment."""
    schema = Contract.model_json_schema(by_alias=True)
    return _definitions({"Contract": schema, **schema["$defs"]})


def metrics_page() -> Iterable[str]:
    """Every metric that a clause can name."""
    parts: list[str] = []
    for origin, needs in _ORIGINS.items():
        parts += [f"## From {origin}", needs]
        parts += [_quantity(quantity) for quantity in QUANTITIES.values() if quantity.source is origin]
    parts += [
        "## Derived",
        "A factor times the mean of a recorded metric; factors come from the contract's `assumptions`.",
    ]
    for derived in DERIVED.values():
        needed = f", needs `{'`, `'.join(derived.needs)}`" if derived.needs else ""
        about = f"From `{derived.base}`{needed}; unit `{derived.unit}`. Source: {derived.citation}."
        parts += [f"### `{derived.key}`", derived.meaning, about]
    return parts


def input_checks_page() -> Iterable[str]:
    """Every reason for which a sequence is not measured; checked in, so that links to it work anywhere."""
    for name, entry in REASONS.items():
        yield f"## `{name}`\n\n{entry.meaning}\n\n**What to do.** {entry.remedy}"


def telemetry_page() -> Iterable[str]:
    """Every metric and attribute that is sent or exposed."""
    histograms = ((f"`{histogram.name}`", f"`{histogram.unit}`", str(histogram.per)) for histogram in RECORDED.values())
    parts = ["## Drift histograms", _HISTOGRAMS, _table(("metric", "unit", "one observation is a"), histograms)]
    parts.append("## Other metrics")
    for metric in METRICS.values():
        attributes = ", ".join(f"`{name}`" for name in metric.attributes) or "no attributes"
        about = f"{str(metric.instrument).capitalize()}, unit `{metric.unit}`; {attributes}."
        parts += [f"### `{metric.name}`", metric.meaning, about]
    attributes_of = ((f"`{label.name}`", ", ".join(label.on), label.meaning) for label in ATTRIBUTES.values())
    parts += ["## Attributes", _table(("attribute", "on", ""), attributes_of)]
    return parts


def commands_page() -> Iterable[str]:
    """Every command with its arguments and options."""
    import typer  # noqa: PLC0415 - of an extra

    from kc_otel import cli  # noqa: PLC0415

    cli._register()  # noqa: SLF001 - what `main` does before it reads the command line
    return _command(typer.main.get_command(cli.app), "kc-otel")


def http_api_page() -> Iterable[str]:
    """Every path of the evaluator's API."""
    from collections import Counter  # noqa: PLC0415

    from kc_otel.serve.api.app import make_api  # noqa: PLC0415
    from kc_otel.serve.api.routes_decisions import Changes  # noqa: PLC0415
    from kc_otel.serve.core import Core  # noqa: PLC0415
    from kc_otel.serve.self_metrics import read  # noqa: PLC0415
    from kc_otel.serve.store.state_file import open_state  # noqa: PLC0415

    core = Core([], open_state(None), external_url="", now=0.0)
    document = make_api(core, lambda: read(core, Counter(), Counter()), Changes(), "0").openapi()
    parts: list[str] = []
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            parts += [f"## `{method.upper()} {path}`", about.get("description", "").strip()]
            rows = [
                (f"`{param['name']}`", param["in"], _kind(param["schema"]), param.get("description", ""))
                for param in about.get("parameters", [])
            ]
            parts.append(_table(("parameter", "in", "kind", ""), rows))
    return parts


def python_page() -> Iterable[str]:
    """Return the page of the public modules: signatures and docstrings, read without importing engines."""
    import griffe  # noqa: PLC0415 - of the tools that build the handbook

    parts: list[str] = []
    options: Any = {"returns_multiple_items": False}
    root, docstrings = FOLDER.parents[2], {"docstring_parser": "google", "docstring_options": options}
    loaded = griffe.load("kc_otel", search_paths=[root], **docstrings).modules_collection
    for package, title in PYTHON_PACKAGES.items():
        parts.append(f"## {title}")
        for name in _modules(package):
            module = loaded[name]
            parts += [f"### `{name}`", *_docstring(module)]
            for member in module.exports or ():  # engines find the others by an entry point
                found = module[str(member)]
                parts += _python(found.final_target if found.is_alias else found, "####")
    return parts


PAGES: Final[dict[str, Callable[[], Iterable[str]]]] = {
    "contract/fields.md": fields_page,
    "contract/metrics.md": metrics_page,
    "measure/input-checks.md": input_checks_page,
    "reference/telemetry.md": telemetry_page,
    "reference/commands.md": commands_page,
    "reference/http-api.md": http_api_page,
    "reference/python.md": python_page,
}


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; nothing where there are no rows."""
    lines = ["| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in row) + " |" for row in rows]
    head = "| " + " | ".join(headings) + " |"
    return "\n".join((head, re.sub(r"[^|]+", " --- ", head), *lines)) if lines else ""


def _quantity(quantity: Quantity) -> str:
    averaged = " (means by default per prompt)" if quantity.per in {Unit.TOKEN, Unit.SEQUENCE} else ""
    low = f"({quantity.low:g}" if quantity.low == -math.inf else f"[{quantity.low:g}"
    high = f"{quantity.high:.3g})" if quantity.high == math.inf else f"{quantity.high:.3g}]"
    cap = f"Bounds on its mean are for the mean of min(value, {quantity.cap:g}); `cap` changes that. "
    return (
        f"### `{quantity.key}`\n\n{quantity.meaning}\n\n"
        f"Default statistic `{quantity.statistic}`, observed per {quantity.per}{averaged}; values in {low}, {high}, "
        f"unit `{quantity.unit}`; recorded as `{quantity.name}`. {'' if quantity.cap == quantity.high else cap}"
        f"Source: {quantity.citation}."
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
                "**required**" if field in required else _field_default(about),
                about.get("description", ""),
            )
            for field, about in definition["properties"].items()
        ]
        yield f"## {name}\n\n{definition.get('description', '').strip()}"
        yield _table(("field", "kind", "default", ""), rows)
        found = dict.fromkeys(re.findall(r"'#/\$defs/(\w+)'", repr(definition["properties"])))
        waiting += [found_name for found_name in found if found_name not in seen]
        seen |= set(found)


_NAMES: Final = {"string": "text", "integer": "whole number", "boolean": "true or false"}
_SIGNS: Final = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _kind(about: dict[str, Any]) -> str:
    """Return the values that a JSON Schema allows, in words."""
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
        kind = " or ".join(_kind(choice) for choice in about["anyOf"] if choice.get("type") != "null")
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
        kinds = [_NAMES.get(json_type, json_type) for json_type in ([written] if isinstance(written, str) else written)]
        limits = [f"{sign} {about[key]:g}" for key, sign in _SIGNS.items() if key in about]
        kind = " ".join((" or ".join(kinds), ", ".join(limits))).strip()
    return kind


def _field_default(about: dict[str, Any]) -> str:
    """Return a field's default as a contract would write it."""
    default = about.get("default")
    return _default(format_duration(default) if default and _kind(about).startswith("duration") else default)


def _default(default: Any) -> str:
    if isinstance(default, dict) or default in (None, "", [], False):
        return ""
    return f"`{', '.join(map(str, default))}`" if isinstance(default, list) else f"`{default}`"


def _command(command: Any, name: str) -> Iterator[str]:
    """A command and those below it, which have click's attributes whatever their classes are."""
    from kc_otel.cli.terminal import examples_of  # noqa: PLC0415 - of an extra

    if subcommands := getattr(command, "commands", None):
        for below, subcommand in subcommands.items():
            yield from _command(subcommand, f"{name} {below}")
        return
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    placeholders = [str(argument.metavar or argument.name.upper()) for argument in arguments]
    yield f"## {name}"
    yield f"`{' '.join([name, *placeholders])}`" if arguments else ""
    yield textwrap.dedent(command.help).partition("\n\nExamples:\n")[0].strip()
    yield "```sh\n" + "\n".join(examples_of(command)) + "\n```"
    rows = [(f"`{shown}`", argument.help or "", "") for shown, argument in zip(placeholders, arguments, strict=True)]
    for param in options:
        default = (
            f"`{param.envvar}`" if isinstance(param.envvar, str) and param.default is None else _default(param.default)
        )
        rows.append((f"`{'`, `'.join(param.opts)}`", param.help or "", default))
    yield _table(("option", "", "default"), rows)


_EXAMPLE: Final = re.compile(r"^>{3} .*(?:\n(?!\s*$).*)*", re.MULTILINE)
_DIRECTIVE: Final = re.compile(r"\s*# doctest: .*$", re.MULTILINE)


def _python(found: Any, level: str) -> Iterator[str]:
    """A function, or a class with its public methods; of anything else the docstring alone."""
    yield f"{level} `{found.path.rpartition('.')[2]}`"
    if found.is_function or (found.is_class and found.parameters):
        yield f"```py\n{'class ' if found.is_class else ''}{_wrapped(found.signature())}\n```"
    yield from _docstring(found)
    if found.is_class:
        for name, member in found.members.items():
            if name[0] != "_" and not member.is_alias and member.docstring and (member.is_function or member.is_class):
                yield from _python(member, f"{level}#")


def _wrapped(signature: str) -> str:
    """A signature of more than 100 characters, a parameter a line."""
    if len(signature) <= 100:
        return signature
    depth, parts, start = 0, [], signature.index("(") + 1
    for at in range(start, end := signature.rindex(")")):
        depth += (signature[at] in "([{") - (signature[at] in ")]}")
        if signature[at] == "," and depth == 0:
            parts.append(signature[start:at].strip())
            start = at + 1
    lines = "".join(f"    {part},\n" for part in (*parts, signature[start:end].strip()))
    return f"{signature[: signature.index('(') + 1]}\n{lines}{signature[end:]}"


def _docstring(found: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Paragraphs; lists of arguments, attributes, returned values and errors; examples as code."""
    if found.docstring is None:
        return
    for section in found.docstring.parsed:
        match section.kind.value:
            case "text":
                yield _EXAMPLE.sub(lambda example: f"```pycon\n{_DIRECTIVE.sub('', example[0])}\n```", section.value)
            case "examples":
                for kind, text in section.value:
                    yield f"```pycon\n{text}\n```" if kind.value == "examples" else text
            case kind:
                names = [entry.annotation if kind == "raises" else entry.name for entry in section.value]
                rows = zip(names, (" ".join(entry.description.split()) for entry in section.value), strict=True)
                lines = (f"- `{name}`: {text}" if name else f"- {text}" for name, text in rows)
                yield f"**{kind.capitalize()}**\n\n" + "\n".join(lines)


def _modules(package: str) -> Iterator[str]:
    """The package itself where it exports names, and the public modules of those whose modules are imported by name."""
    imported = import_module(package)
    if getattr(imported, "__all__", None):
        yield package
    if package == "kc_otel.integrations":
        yield from (f"{package}.{info.name}" for info in pkgutil.iter_modules(imported.__path__) if info.name[0] != "_")
    elif package == "kc_otel.client":
        yield from (f"{package}.{name}" for name in _CLIENT_MODULES)


if __name__ == "__main__":
    main()
