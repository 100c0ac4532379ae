"""What `pip install kc-otel` brings: a recorder, a router and a verifier, in an environment with nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kc_otel.machine_code.hatch_build import compiler

REPOSITORY = Path(__file__).resolve().parents[1]
CONTRACT = REPOSITORY / "contracts" / "serving-int8.yaml"
MOST_MIB = 150

RECORD = """
import numpy as np
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
import kc_otel

recorder = kc_otel.Recorder({contract!r}, metric_exporter=ConsoleMetricExporter(), sampling=1.0)
train = np.log(np.random.default_rng(0).uniform(0.1, 0.9, (4, 64)))
recorder.compare(train, train - 0.01, attributes={{"task": "code"}})
recorder.shutdown()
"""
ROUTE = """
import kc_otel
from kc_otel import Router
from kc_otel.judge.decisions import DecisionTable
contract = kc_otel.load_contract({contract!r})
router = Router.from_table(DecisionTable(), contracts=[contract])
print(router.choose(contract.name, {{"task": "code"}}))
"""
VERIFY = """
import time
from kc_otel.client.webhooks import Secret, sign
from kc_otel import verify_webhook
from kc_otel.client.webhooks import new_secret
secret = new_secret()
body = b'{{"status": "firing"}}'
print(verify_webhook(secret, sign([Secret.parse(secret)], "msg_1", body, now=time.time()), body))
"""
ABSENT = ("scipy", "typer", "rich", "httpx", "fastapi", "starlette", "uvicorn", "plotly", "prometheus_client", "torch")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with the wheel of this checkout, and what it depends on."""
    folder = tmp_path_factory.mktemp("install")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, REPOSITORY], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", *folder.glob("*.whl")], check=True)
    return folder / "venv"


@pytest.fixture
def run(environment, tmp_path):
    """A function that runs a program in that environment, away from the checkout, and returns what it prints."""

    def program(source: str) -> str:
        command = [environment / "bin" / "python", "-I", "-c", source.format(contract=str(CONTRACT))]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.strip()

    return program


def test_the_core_is_small(environment):
    """A trainer's environment grows by less than 150 MB, bytecode included."""
    assert sum(path.lstat().st_size for path in (environment / "lib").rglob("*")) < MOST_MIB * 1_000_000


def test_nothing_of_an_extra_comes_along(run):
    found = run(f"from importlib.util import find_spec; print([n for n in {ABSENT} if find_spec(n)])")
    assert found == "[]"


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_one_wheel_has_machine_code_for_every_python(run, environment):
    assert run("from kc_otel import machine_code; print(machine_code.is_available())") == "True"
    (said,) = (environment / "lib").rglob("kc_otel-*.dist-info/WHEEL")
    assert re.search(r"^Tag: py3-none-(?!any)\w+$", said.read_text(), re.MULTILINE)


def test_a_recorder_records_and_exports(run):
    assert {"kc.drift.k3", "kc.drift.tv_token"} <= set(re.findall(r'"name": "([\w.]+)"', run(RECORD)))


def test_a_router_routes(run):
    assert run(ROUTE) == "inference-kernel"


def test_contracts_and_examples_come_along(environment):
    share = environment / "share" / "kc-otel"
    for path in (REPOSITORY / "contracts").glob("*.yaml"):
        assert (share / "contracts" / path.name).read_bytes() == path.read_bytes()
    assert (share / "examples" / "ci" / "README.md").is_file()


def test_a_webhook_is_verified(run):
    assert run(VERIFY) == "{'status': 'firing'}"


def test_the_command_says_what_to_install(environment):
    command = environment / "bin" / "kc-otel"
    told = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (2, "kc-otel: the command line needs typer: pip install 'kc-otel[cli]'\n")
