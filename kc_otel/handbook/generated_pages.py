"""Write the reference pages of the handbook from what they describe, as `make generate` does."""

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

from kc_otel.contract.input_reasons import REASONS
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, RECORDED, Origin, Quantity, Unit
from kc_otel.contract.registry.own_metrics import ATTRIBUTES, METRICS
from kc_otel.contract.units import format_duration

if TYPE_CHECKING:
    import griffe
    from mkdocs.config.defaults import MkDocsConfig

FOLDER: Final = Path(__file__).parent / "pages"
PYTHON_PACKAGES: Final = {
    "kc_otel": "Public interface",
    "kc_otel.integrations": "Engines and trainers",
    "kc_otel.client": "Serving processes and receivers",
    "kc_otel.stats": "Mathematics",
}
"""Public packages, with headings; the other packages are reached by commands."""
_CLIENT_MODULES: Final = ("alive", "openfeature", "router", "training_log", "webhooks")
"""Modules that a service imports or a container runs; the others of `kc_otel.client` serve these and the commands."""

_FIELDS: Final = """\
Every key of a contract, generated from the model that reads it; [the language](index.md) explains how the parts work
together. Any other key is rejected with file and line. `kc-otel reference schema` prints the same for your editor."""
_QUANTITIES: Final = """\
Every value of a clause's `metric:`, generated from the registry; `kc-otel reference metrics` prints the list. P is the
training kernel, Q the inference kernel, w = P(y)/Q(y) the importance ratio of a token y that Q sampled, l = log w; W
and L are those of a whole sequence. `runtime` clauses can also limit any `gen_ai.*` histogram, in seconds."""
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
_CHECKS: Final = """\
Input is checked before it is measured as drift. A sequence that fails a check is not measured; it is counted under the
check's name in `kc.input.invalid` and in `recorder.stats()`. The exception is `reward_out_of_range`: such a sequence
is measured without its reward. A step of the policy can react: `on: invalid-input`. If no sequence of a cell can be
measured, the cell is INVALID_INPUT. `kc-otel reference invalid-input` prints this list.

These faults are found in the numbers alone, without any declaration: `placeholder`, `not_logprobs`, `one_value`,
`not_same_tokens`, `not_sampled`, `temperature_mismatch`, `truncated_sampling` and, with token ids,
`penalised_sampling`. The first log line says how many tokens of how many sequences are affected, where, on which side,
and by what shift. If a sampler setting shows in a tenth of a batch, the whole batch is rejected; likewise if the mean
of P/Q is significantly above 1. The evaluator checks that mean, too, over the window of each slice and pair of kernels.

Eight exact zeros in a row on both sides count as placeholders. A shorter run, of three or more, counts only if nine in
ten sequences of a batch begin, or end, with it and hardly any zero occurs elsewhere. A single zero at the end of nine
in ten sequences counts if no other token is exactly 0 although at least thirty are nearly 0. A number that many tokens
share on one side only, such as its lowest, is a floor or a filler.

The inference side's numbers alone can show that its probabilities are too high, even if both sides share the fault:
tokens with a probability below one half then occur too rarely (error probability 1e-6), and, if token ids and prompts
are known, the probabilities of the different first tokens of a prompt's answers add up to more than 1. `not_sampled`
reports log-probabilities that were divided by the length or taken to base 10, and greedy or colder sampling with the
raw model's log-probabilities.

No check finds these faults, because the numbers are consistent with them:

- All log-probabilities multiplied by more than 1, as in base 2: every difference grows, and the kernel looks worse
  than it is.
- All log-probabilities multiplied by less than 1, if many tokens were likely and token ids or prompts are missing:
  drift looks smaller by that factor, and a bad kernel may pass. Record token ids and prompts (`token_ids`, `group`).
- One side replaced by the mean of both, both sides transformed by the same smooth function, or tokens left out because
  the sides differ there: drift looks smaller, and a bad kernel may pass. Record log-probabilities before anything
  transforms or filters them.
- Single log-probabilities replaced on the training side at irregular places (borders of packed chunks), or those of
  improbable tokens raised to the last entry of a top-k list: drift looks larger, as from a kernel that fails at single
  tokens. On the inference side, one such token in a hundred shows in the mean of P/Q.
- top-k on one side only, if drift hides it: the removed mass adds to the drift, and the kernel looks worse.
- A temperature between 0.9 and 1.1 on one side, beside drift as large as that of an fp8 cache or of int8: TV changes
  by up to a sixth.
- The likeliest tokens' log-probabilities on both sides, without token ids and prompts: drift looks smaller, and a bad
  kernel may pass.
- A copy of the other side, which looks like a kernel that agrees as closely: a bad kernel may pass. The gate notes a
  column that is the other one, its rounding, or the other one with noise above 1e-5 that does not depend on the token.
- Both sides rounded in the same way: the remaining difference is measured, and errors in both directions cancel.
- Text that was scored but not sampled, such as tool output, under kernels that hardly differ: it looks like sampled
  text. With more drift it is found, because the mean of P/Q over it is significantly above 1.

If only one side keeps log-probabilities in bfloat16 or float16, they are measured, and the log says so once: their
rounding is part of the difference. Keep them in float32 on both sides."""
_TELEMETRY: Final = """\
Every metric and attribute that kc-otel sends or exposes, generated from the registry that the code is checked
against."""
_HISTOGRAMS: Final = """\
Exponential histograms, cumulative, with the attributes `kc.contract`, `kc.slice`, `kc.kernel.train`,
`kc.kernel.inference`, and `kc.operator` on those of operators. [Metrics](../contract/metrics.md) defines each."""
_HTTP: Final = """\
The evaluator's API port, 4320 by default. `/openapi.json` describes it for programs. Beyond loopback every
path but `/healthz`, `/readyz`, `/openapi.json` and the handbook requires a [token](../run/access.md)."""
_PYTHON: Final = """\
The names in `kc_otel` itself are the public interface. Their arguments and results change only with a new minor
version, and the changelog says how. The other names on this page may change with the engine or trainer that they
support. Every other module is private and may change in any release."""


def main() -> None:
    """Write every page."""
    for path, page in PAGES.items():
        (FOLDER / path).write_text(page(), encoding="utf-8")


def on_post_build(config: MkDocsConfig) -> None:
    """Remove files that an English site does not need: source maps, other languages' word lists, sitemaps."""
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
    """Every reason for which a sequence is not measured; checked in, so that links to it work anywhere."""
    reasons = (f"## `{name}`\n\n{entry.meaning}\n\n**What to do.** {entry.remedy}" for name, entry in REASONS.items())
    return _page("Why a sequence is not measured", _CHECKS, *reasons)


def telemetry_page() -> str:
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

    from kc_otel.serve.api.app import make_api  # noqa: PLC0415
    from kc_otel.serve.api.routes_decisions import Changes  # noqa: PLC0415
    from kc_otel.serve.core import Core  # noqa: PLC0415
    from kc_otel.serve.self_metrics import read  # noqa: PLC0415
    from kc_otel.serve.store.state_file import open_state  # noqa: PLC0415

    core = Core([], open_state(None), external_url="", now=0.0)
    document = make_api(core, lambda: read(core, Counter(), Counter()), Changes(), "0").openapi()
    parts = []
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            parts += [f"## `{method.upper()} {path}`", about.get("description", "").strip()]
            rows = [
                (f"`{param['name']}`", param["in"], _kind(param["schema"]), param.get("description", ""))
                for param in about.get("parameters", [])
            ]
            parts.append(_table(("parameter", "in", "kind", ""), rows))
    return _page("HTTP API", _HTTP, *parts)


def python_page() -> str:
    """Return the page of the public modules: signatures and docstrings, read without importing engines."""
    import griffe  # noqa: PLC0415 - of the tools that build the handbook

    parts = [_PYTHON]
    for package, title in PYTHON_PACKAGES.items():
        parts.append(f"## {title}")
        for name in _modules(package):
            options: Any = {"returns_multiple_items": False}
            module = griffe.load(
                name, search_paths=[FOLDER.parents[2]], docstring_parser="google", docstring_options=options
            )
            parts += [f"### `{name}`", *_docstring(module)]
            for member in module.exports or [key for key in module.members if key[0] != "_"]:
                found = module[str(member)]
                parts += _python(found.final_target if found.is_alias else found, "####")
    return _page("Python", *parts)


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
    averaged = " (means by default per prompt)" if quantity.per in {Unit.TOKEN, Unit.SEQUENCE} else ""
    low = f"({quantity.low:g}" if quantity.low == -math.inf else f"[{quantity.low:g}"
    high = f"{quantity.high:.3g})" if quantity.high == math.inf else f"{quantity.high:.3g}]"
    cap = f"Bounds on its mean are for the mean of min(value, {quantity.cap:g}); `cap` changes that. "
    return (
        f"### `{quantity.key}`\n\n{quantity.meaning}\n\n"
        f"Default statistic `{quantity.statistic}`, observed per {quantity.per}{averaged}; values in {low}, {high}, "
        f"unit `{quantity.unit}`; recorded as `{quantity.name}`. {'' if quantity.cap == quantity.high else cap}"
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
