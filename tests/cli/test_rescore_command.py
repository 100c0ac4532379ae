"""`kc-otel rescore` with a user's own function as the training kernel."""

import sys
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

from kc_otel.cli import measure_commands
from kc_otel.record.kernel import Kernel
from kc_otel.record.recorder import Recorder
from kc_otel.record.telemetry import environment
from kc_otel.recordings.spool import Spool, SpoolReader
from kc_otel.recordings.worst_sequences import read_worst
from tests.recordings.test_rescore import request
from tests.tools.completions import completions, table
from tests.tools.contracts import contract_text
from tests.tools.memory import Memory

CONTRACT = contract_text("a", statistical=[{"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.01}])
MODULE = """
import numpy as np

def half_a_nat_less(prompt_ids, token_ids, processing):
    return [np.full(len(each), -1.5) for each in token_ids]

nothing = None
"""


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    """Runs the command in a folder with a contract, a module and a spool of three requests, one of them greedy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "metric_exporters", lambda _: (Memory(),))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    (tmp_path / "my_kernel.py").write_text(MODULE)
    fill(tmp_path / "spool.sqlite")
    return partial(command("rescore"), "spool.sqlite", "--contract", "contract.yaml")


def fill(path, temperature=0.0):
    """A spool of three requests, of which the last was sampled at this temperature."""
    spool = Spool(path)
    for number in range(3):
        processing = {"temperature": temperature} if number == 2 else {}
        kernel = Kernel("vllm")
        spool.put(request(f"r{number}", kernel=kernel, processing=processing, logprobs_mode="processed", weights=7))
    spool.close()


def test_requests_are_scored_by_a_function_and_leave_the_spool(run):
    code, out, _ = run("--scorer", "my_kernel.py:half_a_nat_less")
    assert code == 0
    assert "2 requests scored: 12 sampled tokens compared, 20 read at" in out
    assert "0 left in the spool" in out
    assert "not comparable: 1 greedy" in out


@pytest.mark.parametrize("exporter", ["none", "console"])
def test_requests_that_nothing_exports_stay_in_the_spool(run, monkeypatch, exporter):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", exporter)
    monkeypatch.setattr(environment, "metric_exporters", lambda _: (ConsoleMetricExporter(),))
    code, out, err = run("--scorer", "my_kernel.py:half_a_nat_less")
    assert (code, "3 left in the spool" in out) == (1, True)
    assert f"measured, not exported: OTEL_METRICS_EXPORTER={exporter} sends nothing" in err


def test_a_rescorer_that_starts_again_is_the_same_recorder_and_never_ends_the_kernel(run, tmp_path, monkeypatch):
    """The engine serves on while nobody scores: that the rescorer shuts down proves nothing of its kernel."""
    made = []

    def recorder(*args, **options):
        exporter = Memory()
        made.append((exporter, options["resource"]))
        return Recorder(*args, metric_exporter=exporter, **options)

    monkeypatch.setattr("kc_otel.record.recorder.Recorder", recorder)
    for _ in range(2):
        fill(tmp_path / "spool.sqlite")
        assert run("--scorer", "my_kernel.py:half_a_nat_less")[0] == 0
    (first, resource), (second, other) = made
    assert resource == other != {}
    for exporter in (first, second):
        points = exporter.points("kc.kernel.info", kc_kernel_role="inference", kc_kernel_engine="vllm")
        assert {point.value for point in points} == {1}


@pytest.mark.parametrize("lost", [False, True])
def test_a_rescorer_that_ends_with_its_engine_ends_the_kernel_once_the_spool_is_empty(run, monkeypatch, lost):
    """It was stopped before it took anything; what is not exported stays, and then nothing is said to have ended."""
    exporter = Memory()

    @contextmanager
    def stopped():
        stop = threading.Event()
        stop.set()
        yield stop

    monkeypatch.setattr(measure_commands, "stopped_by_signals", stopped)
    monkeypatch.setattr("kc_otel.record.recorder.Recorder", partial(Recorder, metric_exporter=exporter))
    if lost:
        monkeypatch.setattr("kc_otel.recordings.rescorer.why_unexported", lambda *_: "lost")
    code, out, errors = run("--scorer", "my_kernel.py:half_a_nat_less", "--follow", "--with-engine")
    assert (code, "0 left in the spool" in out) == (int(lost), not lost)
    assert ("the spool keeps the requests, and another run counts again what was accepted" in errors) is lost
    last = exporter.points("kc.kernel.info", kc_kernel_role="inference", kc_kernel_engine="vllm")[-1]
    assert last.value == int(lost)


@pytest.mark.parametrize("options", [(), ("--follow",)])
def test_nothing_reports_a_kernel_before_a_request_of_it_is_in_the_spool(run, tmp_path, monkeypatch, options):
    """The contract's declaration would count as a kernel that has reported, and the one before as replaced by it."""
    exporter, looks = Memory(), []

    class Stop(threading.Event):
        def wait(self, timeout=None):
            if looks.append(timeout) or len(looks) == 3:
                self.set()
            return self.is_set()

    @contextmanager
    def stopped():
        yield Stop()

    with SpoolReader(tmp_path / "spool.sqlite") as reader:
        reader.done(number for number, _ in reader.take(100))
    monkeypatch.setattr(measure_commands, "stopped_by_signals", stopped)
    monkeypatch.setattr("kc_otel.record.recorder.Recorder", partial(Recorder, metric_exporter=exporter))
    code, out, _ = run("--scorer", "my_kernel.py:half_a_nat_less", *options)
    assert (code, out.strip(), len(looks)) == (0, "0 requests scored: the spool is empty", 3 * len(options))
    assert exporter.exports == []


def test_other_weights_are_refused_by_name_and_measured_as_a_lag_by_step(run):
    assert "not comparable: 2 wrong_weights" in run("--scorer", "my_kernel.py:half_a_nat_less", "--weights", "final")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of --model, --train-url and --scorer"),
        (["--scorer", "my_kernel.py:half_a_nat_less", "--model", "x"], "give one of --model, --train-url and --scorer"),
        (["--scorer", "nowhere.py:f"], "nowhere.py: is no Python file; write FILE.py:NAME"),
        (["--scorer", "my_kernel.py:f"], "my_kernel.py: has no 'f'; write the name of a function"),
        (["--scorer", "my_kernel.py:nothing"], "is not a function"),
        (["--train-url", "127.0.0.1:1"], "is not a URL such as http://127.0.0.1:8000"),
        (["--train-url", "http://127.0.0.1:1"], "train endpoint http://127.0.0.1:1: does not answer"),
        (["--model", "x", "--dtype", "int3"], "--dtype int3: write one of float32"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_leaves_the_spool(run, arguments, said, tmp_path):
    """Exit code 2, one line, and the requests are still there."""
    code, _, err = run(*arguments)
    assert code == 2
    assert said in err
    with SpoolReader(tmp_path / "spool.sqlite") as reader:
        assert len(reader) == 3


def test_a_spool_that_is_not_there_is_not_made(run, tmp_path):
    (tmp_path / "spool.sqlite").unlink()
    code, _, err = run("--scorer", "my_kernel.py:half_a_nat_less")
    assert (code, "there is no such spool" in err) == (2, True)
    assert not (tmp_path / "spool.sqlite").exists()


def test_the_worst_are_kept_where_somebody_asks_for_them(run, tmp_path):
    code, _, err = run("--scorer", "my_kernel.py:half_a_nat_less", "--worst", "worst.sqlite", "--redact", "prompts")
    assert code == 0, err
    kept = read_worst(tmp_path / "worst.sqlite", "a", "tv", "all", "")
    assert {sequence.request_id for sequence in kept} == {"r0", "r1"}
    assert {(sequence.prompt, sequence.tokens) for sequence in kept} == {("", tuple("012345"))}
    assert kept[0].value == pytest.approx(-np.expm1(-0.5))


@pytest.mark.parametrize("sglang", [False, True])
def test_a_server_is_the_training_kernel(run, tmp_path, caplog, sglang):
    (tmp_path / "spool.sqlite").unlink()
    fill(tmp_path / "spool.sqlite", 0.5)
    with completions(table(), sglang=sglang) as server:
        code, out, _ = run("--train-url", server.address, "--worst", "worst.sqlite")
    assert code == 0
    assert "2 requests scored: 12 sampled tokens compared" in out
    assert "not comparable: 1 unsupported_processing" in out
    assert "score it with `rescore --model`" in caplog.text
    kept = read_worst(tmp_path / "worst.sqlite", "a", "tv", "all", "")
    expected = [server.logprobs[before, token] for before, token in pairwise([3, 0, 1, 2, 3, 4, 5])]
    assert kept[0].log_ratios == pytest.approx(np.add(expected, 1.0), rel=1e-5)


def test_a_server_scores_as_one_of_its_models_and_only_in_the_declared_number_format(run, tmp_path):
    """The engine that served, asked in place of the training kernel, has no drift from itself."""
    cache = {"train": {"engine": "vllm", "kv_cache_dtype": "auto"}, "inference": {"engine": "vllm"}}
    clauses = [{"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.01}]
    (tmp_path / "contract.yaml").write_text(contract_text("a", kernels=cache, statistical=clauses))
    with completions(table(), models=("tiny", "tuned"), cache="fp8") as server:
        code, _, err = run("--train-url", server.address)
        assert (code, "serves tiny, tuned; name the model with --train-model" in err) == (2, True)
        code, _, err = run("--train-url", server.address, "--train-model", "tuned")
        assert (code, "kv_cache_dtype auto is declared, and fp8 reported" in err) == (2, True)
        server.cache = "auto"
        code, out, _ = run("--train-url", server.address, "--train-model", "tuned")
        assert (code, "0 left in the spool" in out) == (0, True)
        assert {body["model"] for path, body in server.requests if path == "/v1/completions"} == {"tuned"}


def test_following_waits_for_a_spool_that_is_not_there_yet(run, tmp_path, monkeypatch, caplog):
    path = tmp_path / "spool.sqlite"
    path.unlink()
    waits = []

    class Stop(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            if len(waits) == 3:
                fill(path)
            elif len(waits) == 5:
                self.set()
            return self.is_set()

    monkeypatch.setattr(measure_commands, "stopped_by_signals", lambda: nullcontext(Stop()))
    caplog.set_level("INFO", "kc_otel")
    code, out, _ = run("--scorer", "my_kernel.py:half_a_nat_less", "--follow")
    assert (code, caplog.text.count("waiting for spool.sqlite")) == (0, 1)
    assert "2 requests scored" in out


def test_following_ends_when_it_is_stopped_before_there_is_a_spool(run, tmp_path, monkeypatch):
    (tmp_path / "spool.sqlite").unlink()
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(measure_commands, "stopped_by_signals", lambda: nullcontext(stop))
    assert run("--scorer", "my_kernel.py:half_a_nat_less", "--follow")[0] == 0
    assert not (tmp_path / "spool.sqlite").exists()


@pytest.mark.parametrize("device", ["meta:x", "cuda:77"])
def test_a_device_that_is_not_there_is_refused_before_the_model_is_loaded(run, monkeypatch, device):
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    code, _, err = run("--model", "no/such-model", "--device", device)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"--device {device}: cannot be used" in err
    assert "--device cpu" in err
