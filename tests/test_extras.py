"""What is installed beside the core, and what is said where it is not."""

import ast
import importlib
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest

from kc_otel import __main__ as script
from kc_otel._extras import MissingExtraError, extra
from kc_otel.integrations.trl import instrument
from kc_otel.integrations.vllm.instrumentor import Patches
from kc_otel.stats import Binned, fraction_interval, quantile_interval

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONTRACT = REPOSITORY / "contracts" / "serving-int8.yaml"
CORE = {"numpy", "pydantic", "pydantic_core", "yaml", "opentelemetry", "google", "grpc"}
INSTALLED_WITH_THE_CORE = ("contract", "stats", "record", "recordings", "integrations", "judge", "client")


@pytest.fixture
def without(monkeypatch):
    """A function that makes a library look as if it were not installed."""

    class Absent:
        def __init__(self, library: str) -> None:
            self.library = library

        def find_spec(self, name: str, *_: object) -> None:
            """As where it is not installed, the library itself is what is not found, whatever of it was asked for."""
            if name == self.library:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def hide(library: str) -> None:
        for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Absent(library), *sys.meta_path])

    return hide


def command(monkeypatch, capsys, *arguments: str) -> str:
    """What `kc-otel` with these arguments says on stderr before it gives up with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["kc-otel", *arguments])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "ask",
    [
        lambda sample: fraction_interval(sample, 50.0, alpha_lower=0.005, alpha_upper=0.005),
        lambda sample: quantile_interval(sample, 0.123, alpha_lower=0.0051, alpha_upper=0.005),
    ],
)
def test_an_exact_interval_without_scipy_says_what_to_install(ask, without):
    without("scipy")
    with pytest.raises(MissingExtraError, match=r"interval needs scipy.*'kc-otel\[stats\]'"):
        ask(Binned.of_samples(np.arange(100.0)))


def test_vllm_without_wrapt_says_what_to_install(without):
    without("wrapt")
    with pytest.raises(MissingExtraError, match=r"'kc-otel\[vllm\]'"):
        Patches(None, serving=print).apply()


def test_no_trainer_of_trl_says_which_trainer_to_install():
    with pytest.raises(TypeError, match=r"'kc-otel\[trl\]'"):
        instrument(object(), CONTRACT)


def test_the_command_without_its_extra_says_what_to_install(without, monkeypatch, capsys):
    """In an environment of the core only, `kc-otel` is one line and exit code 2, no traceback."""
    monkeypatch.delitem(sys.modules, "kc_otel.cli", raising=False)
    without("typer")
    said = command(monkeypatch, capsys, "--help")
    assert said == "kc-otel: the command line needs typer: pip install 'kc-otel[cli]'\n"


def test_the_evaluator_without_grpc_says_what_to_install(without, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("kc_otel.serve")]:
        monkeypatch.delitem(sys.modules, name)
    without("grpc")
    said = command(monkeypatch, capsys, "serve", str(CONTRACT), "--no-webhooks", "--state", ":memory:")
    assert said == "kc-otel: the evaluator needs grpc: pip install 'kc-otel[serve]'\n"


def test_dashboards_without_the_sdk_say_what_to_install_and_rules_need_none(without, monkeypatch, capsys, tmp_path):
    for name in [name for name in sys.modules if name.startswith("kc_otel.generate")]:
        monkeypatch.delitem(sys.modules, name)
    without("grafana_foundation_sdk")
    said = command(monkeypatch, capsys, "generate", "grafana", str(CONTRACT), "--out", str(tmp_path))
    assert said == "kc-otel: a dashboard needs grafana_foundation_sdk: pip install 'kc-otel[grafana]'\n"
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["kc-otel", "generate", "prometheus", str(CONTRACT), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        script.main()
    assert not done.value.code


def test_a_defect_of_our_own_is_no_missing_extra():
    with pytest.raises(ModuleNotFoundError) as found, extra("cli", "a test"):
        importlib.import_module("kc_otel.no_such_room")
    assert not isinstance(found.value, MissingExtraError)


def test_every_extra_that_is_asked_for_exists():
    text = "\n".join(path.read_text() for path in (REPOSITORY / "kc_otel").rglob("*.py"))
    named = set(re.findall(r'\bextra\("(\w+)"', text)) | set(re.findall(r"kc-otel\[(\w+)\]", text))
    assert named <= set(PROJECT["optional-dependencies"])
    assert {"cli", "serve", "stats", "torch", "vllm", "grafana", "openfeature", "parquet"} <= named


LIBRARIES = {
    "fastapi", "grafana_foundation_sdk", "httpx",
    "openfeature", "opentelemetry.instrumentation", "prometheus_client", "pyarrow", "ray", "rich", "scipy", "sglang",
    "starlette", "torch", "transformers", "triton", "trl", "typer", "uvicorn", "verl", "vllm", "wrapt",
}  # fmt: skip


@pytest.mark.slow
def test_every_module_without_any_extra_works_or_says_what_to_install(tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(
        textwrap.dedent(f"""
        import importlib, pathlib, sys
        class Absent:
            def find_spec(self, name, *_):
                if name in {LIBRARIES!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Absent())
        import kc_otel
        from kc_otel._extras import MissingExtraError
        root = pathlib.Path(kc_otel.__file__).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            if parts[1] in ("handbook", "__main__"):
                continue
            name = ".".join(parts).removesuffix(".__init__")
            try:
                importlib.import_module(name)
            except MissingExtraError as error:
                print(name, "|", error)
            except Exception as error:
                print(name, "| FAILED", repr(error))
        """)
    )
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, cwd=REPOSITORY,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY)})  # fmt: skip
    said = dict(line.split(" | ") for line in done.stdout.splitlines())
    names = "|".join(PROJECT["optional-dependencies"])
    odd = [f"{module}: {text}" for module, text in said.items()
           if not re.search(rf" needs [\w.]+: pip install 'kc-otel\[({names})\]'$", text)]  # fmt: skip
    assert not odd, "\n".join(odd)
    for module, name in (
        ("kc_otel.serve.server", "serve"), ("kc_otel.offline.run_log.run_rules", "stats"),
        ("kc_otel.recordings.endpoints.endpoint_recording", "cli"),
        ("kc_otel.cli.serve_command", "cli"), ("kc_otel.recordings.endpoints.endpoint_client", "cli"),
        ("kc_otel.client.openfeature", "openfeature"), ("kc_otel.generate.grafana.sdk", "grafana"),
        ("kc_otel.integrations.torch", "torch"), ("kc_otel.integrations.vllm.instrumentor", "vllm"),
        ("kc_otel.serve.receivers", "serve"), ("kc_otel.serve.api", "serve"),
    ):  # fmt: skip
        assert said[module].endswith(f"'kc-otel[{name}]'")
    core = {name for name in said if name.startswith(("kc_otel.contract", "kc_otel.record.recorder"))}
    assert not core, f"a trainer needs {core}"


def unconditional(body):
    """Top-level names of the libraries that a module's statements import wherever the module is imported."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.With) and not any("extra(" in ast.unparse(item) for item in node.items):
            yield from unconditional(node.body)


@pytest.mark.parametrize("room", INSTALLED_WITH_THE_CORE)
def test_a_room_of_the_core_imports_only_core_dependencies(room):
    ours = {*sys.stdlib_module_names, *CORE, "kc_otel"}
    for path in (REPOSITORY / "kc_otel" / room).rglob("*.py"):
        foreign = set(unconditional(ast.parse(path.read_text()).body)) - ours
        assert not foreign, f"{path.relative_to(REPOSITORY)} imports {sorted(foreign)}"
