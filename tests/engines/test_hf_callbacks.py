"""Hugging Face's own Trainer with the callbacks: supervised training, an inference copy in bfloat16, a halt."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import pytest
import torch

from examples.tiny_model import prompts
from kc_otel import Recorder, TrainingLog
from kc_otel.integrations.transformers import FollowDirectives, KernelContractCallback, Sample, log_verdicts
from kc_otel.recordings.scoring import hf_scorer
from tests.engines._vllm import SLICES
from tests.tools.contracts import contract_of
from tests.tools.docstrings import run_examples
from tests.tools.judge import Judge
from tests.tools.memory import Memory

pytestmark = pytest.mark.slow

CONTRACT = contract_of(
    kernels={"train": {"engine": "torch"}, "inference": {"engine": "torch", "dtype": "bfloat16"}},
    slices=SLICES,
    statistical=[{"id": "drift", "metric": "abs_log_ratio", "unit": "token", "statistic": "mean", "limit": 0.05}],
    runtime=[{"id": "lag", "metric": "weights_lag", "statistic": "max", "limit": 0}],
    observability={"window": "5m", "long_window": "10m", "min_samples": 200, "heartbeat": "60s"},
    escalation=[{"on": "fail", "severity": "warning", "do": ["notify"]}],
)


@pytest.fixture
def judged():
    judge = Judge(CONTRACT)
    recorder = Recorder(CONTRACT, metric_exporter=judge, export_interval=1000.0)
    yield recorder, judge
    recorder.shutdown()


@pytest.fixture
def texts(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return {
        task: [tokenizer(text)["input_ids"][:48] for text in prompts(task, 24, characters=200)]
        for task in ("code", "prose")
    }


@pytest.fixture
def samples(texts):
    """Held-out text, more of which counts than in the training batches."""
    return [Sample(ids[:8], ids[8:], {"task": task}) for task, rows in texts.items() for ids in rows]


@pytest.fixture
def trainer(tiny_model, texts, tmp_path):
    def make(*callbacks, **changes):
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        rows = [{"input_ids": ids, "labels": ids} for group in texts.values() for ids in group]
        settings = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "eval_steps": 2, **changes}
        settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        return Trainer(
            AutoModelForCausalLM.from_pretrained(tiny_model),
            TrainingArguments(output_dir=str(tmp_path), **settings),
            data_collator=lambda batch: {key: torch.tensor([row[key] for row in batch]) for key in batch[0]},
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:4]),
            callbacks=list(callbacks),
        )

    return make


class Copy:
    """An inference kernel: the same weights in bfloat16, as of the last synchronisation."""

    score = step = trainer = None
    frozen = False

    def sync(self, model):
        if not self.frozen:
            self.score = hf_scorer(copy.deepcopy(model).bfloat16())
            self.step = self.trainer.state.global_step

    def __call__(self, *args):
        return self.score(*args)


def test_the_docstrings_examples_run(trainer, judged, samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    (tmp_path / "contract.yaml").write_text(CONTRACT.model_dump_json(by_alias=True))
    running = trainer(max_steps=2)
    running.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    score = hf_scorer(copy.deepcopy(running.model).bfloat16())
    given = {"trainer": running, "score": score, "samples": samples, "recorder": judged[0]}
    run_examples("kc_otel.integrations.transformers", **given)


def test_an_inference_copy_passes_until_its_weights_are_no_longer_synchronised(trainer, judged, samples):
    """Every other step both kernels score held-out text: rounding passes, and stale weights fail at the next look."""
    recorder, judge = judged
    kernel = Copy()
    callback = KernelContractCallback(
        recorder, kernel, samples, every=2, sync=kernel.sync, weights=lambda: kernel.step, batch_size=8
    )
    running = kernel.trainer = trainer(callback, max_steps=4)
    running.train()
    recorder.force_flush()
    verdicts = judge.verdicts()
    assert {verdict.status.value for verdict in verdicts.values()} == {"PASS"}
    assert verdicts["drift", "code"].samples == 2 * 24 * 40
    assert verdicts["drift", "all"].estimate > 1e-3

    kernel.frozen = True
    running = kernel.trainer = trainer(callback, max_steps=8)
    running.train()
    recorder.force_flush()
    verdicts = judge.verdicts()
    assert verdicts["lag", "all"].status.value == verdicts["drift", "all"].status.value == "FAIL"


def test_the_samples_of_a_prompt_count_once_at_each_evaluation(trainer):
    """Though batches are sorted by length, which takes them apart; and samples may be made anew each time."""
    memory = Memory()
    clause = {"id": "tv", "metric": "tv_token", "unit": "prompt", "limit": 0.05}
    recorder = Recorder(contract_of(statistical=[clause]), metric_exporter=memory, export_interval=1000.0)
    made = [Sample([1 + prompt] * 4, [9] * (4 + more)) for prompt in range(5) for more in range(6)]
    kernel = Copy()
    callback = KernelContractCallback(recorder, kernel, lambda: made, sync=kernel.sync, batch_size=7)
    kernel.trainer = trainer(callback, eval_strategy="steps")
    kernel.trainer.train()
    recorder.shutdown()
    counted = {point.attributes["kc.outcome"]: point.value for point in memory.points("kc.recorder.prompts")}
    assert counted == {"whole": 5 * 2}  # at two evaluations


def test_verdicts_are_in_what_the_trainer_logs(trainer, samples):
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def on_log(self, _, state, *__, logs, **___):
            reported.append((state.global_step, logs))

    class Wait(TrainerCallback):
        def on_step_end(self, *_, **__):
            assert recorder.force_flush()

    reported, kernel = [], Copy()
    with Recorder(CONTRACT, metric_exporter=Judge(CONTRACT), log=TrainingLog()) as recorder:
        callback = KernelContractCallback(recorder, kernel, samples, every=2, sync=kernel.sync, batch_size=8)
        running = kernel.trainer = trainer(callback, Wait(), logging_steps=2)
        running.callback_handler.callbacks.insert(0, Reporter())
        undo = log_verdicts(running, recorder)
        running.train()
        for step, logs in [entry for entry in reported if "loss" in entry[1]]:
            assert step in {2, 4}
            assert logs["kc/drift/verdict"] == logs["kc/failing"] == 0.0
            assert 1e-3 < logs["kc/drift/all"] < logs["kc/drift/bound"] < logs["kc/drift/limit"] == 0.05
        undo()
        running.log({"loss": 1.0})
        assert set(reported[-1][1]) <= {"loss", "epoch"}


def test_a_log_of_verdicts_needs_a_recorder_that_has_one(judged):
    """Silence would look like a contract that is kept."""
    with pytest.raises(ValueError, match=r"make it with log=kc_otel.TrainingLog\(\)"):
        log_verdicts(object(), judged[0])


def test_the_training_kernel_is_the_one_that_trains(trainer, judged, samples, tiny_model):
    """With bf16 training the model is scored inside autocast, which a float32 model of the same weights shows."""
    from transformers import AutoModelForCausalLM

    recorder, judge = judged
    kernel, plain = Copy(), AutoModelForCausalLM.from_pretrained(tiny_model)
    kernel.score = hf_scorer(plain)
    kernel.sync = lambda model: plain.load_state_dict(model.state_dict())
    callback = KernelContractCallback(recorder, kernel, samples, every=1, sync=kernel.sync)
    trainer(callback, max_steps=1, bf16=True).train()
    recorder.force_flush()
    assert judge.verdicts()["drift", "all"].estimate > 1e-3


def test_training_is_the_same_with_and_without(trainer, judged, samples):
    recorder, _ = judged
    kernel = Copy()
    plain = trainer()
    plain.train()
    watched = trainer(KernelContractCallback(recorder, kernel, samples, every=1, sync=kernel.sync))
    kernel.trainer = watched
    watched.train()
    for own, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_failing_scorer_costs_a_comparison_and_no_training(trainer, judged, samples):
    recorder, _ = judged

    def broken(*_):
        raise RuntimeError("out of memory")

    running = trainer(KernelContractCallback(recorder, broken, samples, every=2))
    running.train()
    assert running.state.global_step == 4
    assert recorder.stats().dropped == {"comparison-failed": 2}


def test_a_sharded_model_is_named_as_such(judged, samples):
    """One process cannot score with a part of a model; it says so and does not hang in a collective."""
    recorder, _ = judged
    callback = KernelContractCallback(recorder, hf_scorer(torch.nn.Linear(1, 1)), samples, every=1)
    args = SimpleNamespace(fsdp="full_shard", deepspeed=None)
    callback.on_step_end(args, SimpleNamespace(global_step=1, is_world_process_zero=True), None)
    assert recorder.stats().dropped == {"sharded-model": 1}


def directives(halted):
    """What is asked for after each step, of nothing but halts and weights, by the number of the step."""
    steps = iter(range(1, 100))
    return SimpleNamespace(
        sampling=lambda *_: 1.0,
        resync=lambda *_: "stale",
        halted=lambda *_: "token-tv on all fails" if next(steps) == halted else None,
    )


def test_a_halt_stops_training_after_the_step(trainer, judged):
    sent = []
    follow = FollowDirectives(judged[0], directives(2), sent.append, pause=2)
    running = trainer(follow)
    running.train()
    assert running.state.global_step == 2
    assert follow.loop.reason == "token-tv on all fails"
    assert (sent, follow.loop.sent) == ([running.model], ["stale"])


def _process(rank, store, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    os.environ["OTEL_METRICS_EXPORTER"] = "none"
    sent = []
    asked = directives(1 if rank == 0 else 99)
    follow = FollowDirectives(Recorder(CONTRACT), asked, sent.append if rank == 0 else None)
    control = SimpleNamespace(should_training_stop=False)
    follow.on_step_end(SimpleNamespace(world_size=2), SimpleNamespace(global_step=7), control)
    results.put((rank, follow.loop.reason, control.should_training_stop))
    torch.distributed.destroy_process_group()


def test_the_first_process_halts_all(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_process, args=(rank, tmp_path / "store", results)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    assert sorted(results.get() for _ in processes) == [(rank, "token-tv on all fails", True) for rank in (0, 1)]
