"""Whatever a reader can copy out of the README and the handbook works: it is run, checked or looked up here."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import json
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kc_otel import Recorder, cli
from kc_otel.cli.terminal import examples_of
from kc_otel.client.router import Router
from kc_otel.contract.errors import ContractError
from kc_otel.contract.lint import lint
from kc_otel.contract.load import load_text
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.contract.registry.own_metrics import METRICS, prometheus_name
from tests.handbook.snippets import EXAMPLES, PAGES, ROOT, Snippet, commands, prose, snippets
from tests.tools.commands import accepted, kc_otel, named

BASE = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy-7b, version: 1, owner: tests}
kernels: {train: {engine: torch, dtype: bfloat16}, inference: {engine: vllm, dtype: fp8}}
assumptions: {reward_range: [0, 1], horizon: 1024, advantage_max: 5, score_norm_max: 40, clip: 0.2}
slices: {code: {where: {task: code}}}
statistical: [{id: token-tv, metric: tv_token, unit: sequence, limit: 0.05}]
escalation: [{on: fail, do: [notify]}]
"""
READERS_MODULES = {"verl.trainer.main_ppo", "sglang.launch_server"}
READERS_PROGRAMS = {
    "vllm", "curl", "echo", "docker", "git", "kubectl", "otelcol-contrib", "mimirtool", "openssl", "cp", "export",
    "opentelemetry-instrument", "promtool", "ray", "torchrun", "python", "sleep",
}  # fmt: skip


def ids(found: list[Snippet]) -> dict[str, Any]:
    return {"argvalues": found, "ids": list(map(str, found))}


RUNS = [page for page in PAGES if snippets(page, language="python") or snippets(page, language="console")]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs(page: Path, workshop: Path, reader: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it shows is done in order, in one folder: files are written, Python and `$` lines run, output compared.

    Recorders of the page measure everything, and drop nothing.
    """
    monkeypatch.setattr("kc_otel.record.sampling.Sampler.takes", lambda *_: True)
    names = reader
    try:
        for snippet in snippets(page):
            if snippet.run_by:
                continue
            if snippet.title:
                (workshop / snippet.title).write_text(snippet.text)
            if snippet.language == "console":
                console(snippet)
            elif snippet.language == "python" and ">>>" in snippet.text:
                interpreter(snippet, names)
            elif snippet.language == "python":
                exec(compile(snippet.text, str(snippet), "exec"), names)
        assert [value for value in names.values() if isinstance(value, Recorder) and dropped(value)] == []
    finally:
        for value in list(names.values()):
            if isinstance(value, Recorder):
                value.shutdown()
            elif isinstance(value, Router):
                value.close()


def dropped(recorder: Recorder) -> bool:
    """Whether a recorder dropped anything, which its log names."""
    recorder.force_flush()
    return bool(recorder.stats().dropped)


def interpreter(snippet: Snippet, names: dict[str, Any]) -> None:
    """Run `>>>` lines and compare what they print."""
    lines = doctest.DocTestParser().get_doctest(snippet.text, names, str(snippet), str(snippet.page), snippet.line)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failures = runner.run(lines, out=said.append, clear_globs=False).failed
    names.update(lines.globs)
    assert not failures, "".join(said)


def console(snippet: Snippet) -> None:
    """Run `$` lines; what is shown below each has to be among what it prints, in that order."""
    shown: list[tuple[str, list[str]]] = []
    for line in snippet.text.splitlines():
        if line.startswith("$ "):
            shown.append((line[2:], []))
        else:
            shown[-1][1].append(line)
    for line, expected in shown:
        (words,) = commands(line)
        assert words[0] == "kc-otel", f"{snippet}: {line}"
        cli._register()
        result = CliRunner().invoke(cli.app, words[1:], env=dict(os.environ), prog_name="kc-otel")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        printed = [" ".join(printed_line.split()) for printed_line in result.output.splitlines()]
        for text in filter(None, (" ".join(text.split()) for text in expected)):
            if text != "...":
                assert text in printed, f"{snippet}: $ {line}\n{text!r} is not printed:\n{result.output}"
                printed = printed[printed.index(text) + 1 :]
    assert result.exit_code == snippet.exit_code, f"{snippet}: {result.output}"


@pytest.mark.parametrize("snippet", **ids(snippets(*PAGES, language="yaml")))
def test_yaml_is_a_contract_or_a_part_of_one(snippet: Snippet) -> None:
    """A contract has no errors and no warnings; a part of one has none in the place of that part."""
    if snippet.run_by:
        return
    content = yaml.load(snippet.text, yaml.BaseLoader)
    if isinstance(content, list):
        section = "escalation" if "on" in content[0] else "statistical"
        text = BASE.replace(
            next(line for line in BASE.splitlines() if line.startswith(f"{section}:")), f"{section}:\n{snippet.text}"
        )
    elif "apiVersion" in content:
        text = snippet.text
    elif set(content) <= {field.alias or name for name, field in Contract.model_fields.items()}:
        text = (
            "".join(line for line in BASE.splitlines(keepends=True) if line.split(":")[0] not in content) + snippet.text
        )
    else:
        return  # another program's file: it is YAML
    if snippet.note == "refused":
        with pytest.raises(ContractError):
            load_text(text, str(snippet))
        return
    assert lint(load_text(text, str(snippet))) == []


@pytest.mark.parametrize("snippet", **ids(snippets(*PAGES, language="json")))
def test_json_is_json(snippet: Snippet) -> None:
    json.loads(snippet.text)


@pytest.mark.parametrize("snippet", **ids(snippets(*PAGES, *EXAMPLES, language="sh")))
def test_commands_exist_with_these_options(snippet: Snippet) -> None:
    for words in commands(snippet.text):
        known(words)


def known(words: list[str]) -> None:
    program, arguments = words[0], words[1:]
    if program == "kc-otel":
        accepted(arguments)
    elif program == "make":
        targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets, words
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        asked = {extra for found in re.findall(r"\[(.*?)\]", " ".join(arguments)) for extra in found.split(",")}
        assert asked <= set(project["optional-dependencies"]), words
    elif program.endswith("python") and arguments[0] == "-m":
        assert arguments[1] in READERS_MODULES or importlib.util.find_spec(arguments[1]), words
    else:
        assert program.rpartition("/")[2] in READERS_PROGRAMS, words


def test_every_help_has_examples_that_exist() -> None:

    def walk(command: Any, path: str) -> None:
        examples = examples_of(command)
        for line in examples:
            assert line.startswith(path), line
            for words in commands(line):
                known(words)
        below = getattr(command, "commands", {})
        assert examples or below, path
        for name, subcommand in below.items():
            walk(subcommand, f"{path} {name}")

    walk(kc_otel(), "kc-otel")


SAYING = [
    *(path for kind in ("py", "js", "html") for path in sorted((ROOT / "kc_otel").rglob(f"*.{kind}"))),
    *(path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in {".py", ".md", ".yaml", ".yml", ".sh"}),
    *(ROOT / name for name in ("Dockerfile", "docker-compose.yml", "Makefile", "CHANGELOG.md")),
]
COMMAND = re.compile(r"(?P<quoted>(?:`|\$ |/)?)kc-otel (?P<words>[a-z][a-z-]*(?: [a-z-]+)*)(?P<rest>[^`;),\"\n]*)")


def test_messages_name_commands_that_exist() -> None:
    """A command in a message, a comment, the page or an example has this name, and the options that stand beside it."""
    checked = 0
    for path in SAYING:
        for said in COMMAND.finditer(path.read_text(encoding="utf-8")):
            if not said["quoted"] and " --" not in said["rest"]:
                continue  # a sentence about kc-otel
            command, _ = named(said["words"].split())
            whole = command is not kc_otel() and (
                not getattr(command, "commands", None) or not said["rest"].strip(" `")
            )
            assert whole, f"{path.relative_to(ROOT)}: no such command: {said[0]}"
            options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
            asked = re.findall(r"(?<= )--[a-z-]+", said["rest"])
            assert {*asked} <= options | {"--help"}, f"{path.relative_to(ROOT)}: {said[0]}"
            checked += 1
    assert checked > 50


@pytest.mark.parametrize("snippet", **ids([snippet for snippet in snippets(*PAGES) if snippet.run_by]))
def test_what_is_run_elsewhere_is_run_there(snippet: Snippet) -> None:
    """The test that a block names exists, and what the block imports of kc_otel does too."""
    path, _, test = snippet.run_by.partition("::")
    defined = {
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert test in defined, snippet.run_by
    if snippet.language == "python":
        for node in ast.walk(ast.parse(snippet.text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kc_otel"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.mark.parametrize("snippet", **ids(snippets(*PAGES, language="promql")))
def test_queries_name_metrics_that_exist(snippet: Snippet) -> None:
    names = {prometheus_name(metric) for metric in (*METRICS.values(), *RECORDED.values())}
    asked = set(re.findall(r"\bkc_\w+(?=[{\[ )]|$)", snippet.text, re.MULTILINE))
    assert asked, "a query without a metric of ours"
    assert asked <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_backticks_exist(page: Path) -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "kc_otel").rglob("*.py"))
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page)):
        if re.match(r"kc-otel [a-z]", code):
            command, words = named(shlex.split(code)[1:])
            assert command is not kc_otel(), code
            options = {option for parameter in command.params for option in parameter.opts}
            assert {word.split("=")[0] for word in words if word.startswith("--")} <= {*options, "--help"}, code
        elif found := re.fullmatch(r"(kc_otel(?:\.\w+)+)(?:\(.*\))?", code):
            assert resolves(found[1]), code
        elif re.match(r"(kc_otel|contracts|examples|dashboards|tests)/[\w/.{}*-]*$", code):
            assert list(ROOT.glob(code.rstrip("/"))) or (ROOT / code).exists(), code
        elif re.fullmatch(r"KC_OTEL_[A-Z_]+", code):
            assert code in source or re.match(
                r"KC_OTEL_WEBHOOK_PAGER_(URL|SECRET|SECRET_FILE|FORMAT|AUTHORIZATION|ALLOW_PRIVATE)$", code
            ), code
        elif re.fullmatch(r"make [a-z-]+", code):
            known(code.split())


def resolves(dotted: str) -> bool:
    module, rest = dotted, []
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name and not dotted.startswith(error.name):
                return True  # an engine's integration, and the engine is not installed here
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for name in rest:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"\]\((?!https?:)([^)#]+)", text)) | set(
        re.findall(r'(?:src|srcset)="(?!https?:)([^"]+)"', text)
    )
    assert linked
    assert {path for path in linked if not (ROOT / path).exists()} == set()
