"""Recorders and kernels that report themselves: the contract that they apply, when they were heard, their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kc_otel.contract.model import Contract, KernelSpec, KernelSpecs, declared_otherwise
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.recorders import (
    ONE_KERNEL,
    KernelInfo,
    LastReport,
    Recorders,
    kernel_names,
    stand_in,
    unlike_declared,
)
from kc_otel.judge.series import SeriesKey
from kc_otel.judge.verdict import Status
from tests.judge.conftest import NOW, Sender, applying, evaluator_of, info_request, make_contract, merge, take
from tests.tools.verdicts import verdicts_of

SERVED = make_contract()
NEWER = make_contract(version=4, statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.2}])
OTHER = make_contract(version=2, slices={"code": {"where": {"task": ["code", "math"]}}})
LACKING = make_contract(version=2, slices={})
CLAUSE = {"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}
RENAMED = make_contract(version=2, statistical=[{**CLAUSE, "id": "tv"}])


class Reporting:
    """A recorder that applies a contract."""

    def __init__(self, applied: Contract | None, instance: str = "0") -> None:
        self.applied, self.instance = applied, instance
        slices = ("all", "code") if applied is None or applied.slices else ("all",)
        self.senders = [Sender(slice=slice, instance=instance, start=NOW - 1.0) for slice in slices]

    def request(self, at: float, value: float = 1e-4) -> Any:
        observed = (sender.request(at, np.full(5000, value)) for sender in self.senders)
        request = merge(info_request(at, 1, self.instance), *observed)
        return request if self.applied is None else applying(self.applied, request)


def judged(evaluator: Evaluator, at: float) -> dict[str, tuple[Status, str]]:
    return {verdict.cell.slice: (verdict.status, verdict.reason) for verdict in verdicts_of(evaluator, at)}


@pytest.mark.parametrize("columns", [False, True])
def test_a_slice_that_every_recorder_defines_otherwise_has_no_verdict(columns: bool) -> None:
    """Also where a recorder of the same identity measured the slice that is meant; other slices are judged."""
    evaluator = evaluator_of(SERVED, columns=columns)
    right, wrong = Reporting(SERVED), Reporting(OTHER)
    for step in range(6):
        take(evaluator, NOW + 10.0 * step, right.request(NOW + 10.0 * step))
    assert {status for status, _ in judged(evaluator, NOW + 50.0).values()} == {Status.PASS}
    at = NOW + 8000.0
    for sender in wrong.senders:
        sender.restart(at - 1.0)
    for step in range(6):
        take(evaluator, at + 10.0 * step, wrong.request(at + 10.0 * step))
    found = judged(evaluator, at + 50.0)
    assert found["all"][0] is Status.PASS
    assert found["code"][0] is Status.NO_DATA
    assert found["code"][1].endswith(
        "a recorder applies version 2 of the contract, where slice code is defined differently or missing; the "
        "evaluator has version 3"
    )
    (row,) = evaluator.missing("policy", at + 50.0)
    assert (row.outcome, row.senders) == ("unknown_slice", 1)
    assert row.text.startswith(
        "slice code of policy version 3 is defined differently or missing in version 2, which the recorder"
    )


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("cumulative", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "instances", [pytest.param(("0", "1"), marks=pytest.mark.slow), [f"{'a' * 200}{rank}{'z' * 200}" for rank in "01"]]
)
def test_a_recorder_is_heard_by_what_it_observes(columns: bool, cumulative: bool, instances: Sequence[str]) -> None:
    """That it reports itself, and its counts of before, is no observation; equal numbers of new ones are.

    Recorders whose long names differ in one place are told apart.
    """
    evaluator = evaluator_of(SERVED, columns=columns)
    senders = [Sender(instance=name, start=NOW - 1.0, cumulative=cumulative) for name in instances]

    def report(at: float, *values: float) -> None:
        sent = (sender.request(at, np.full(500, value)) for sender, value in zip(senders, values, strict=False))
        idle = (sender.request(at) for sender in senders[len(values) :])
        info = (info_request(at, 1, sender.instance) for sender in senders)
        take(evaluator, at, merge(*sent, *idle, *info))

    recorders, key = evaluator.states["policy"].recorders, SeriesKey("kc.drift.tv_token", "all", "a" * 12, "b" * 12)
    for step in range(31):
        report(NOW + 10.0 * step, 1e-4, 0.5)
    recorders.owe({key: NOW + 300.0}, [key])
    for step in range(31, 70):
        report(NOW + 10.0 * step, 1e-4)
        assert recorders.unheard(key, lambda _: 0.0, NOW + 10.0 * step)
    for step in range(70, 100):
        report(NOW + 10.0 * step, 1e-4, 1e-4)
        assert recorders.unheard(key, lambda _: 0.0, NOW + 10.0 * step)
    assert not recorders.unheard(key, lambda _: 0.0, NOW + 1000.0)
    known = recorders.by_version["b" * 12]
    assert (len(known), max(map(len, known)) <= 120) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("applied", [OTHER, pytest.param(LACKING, marks=pytest.mark.slow)])
def test_a_slice_that_some_recorders_define_otherwise_does_not_pass(columns: bool, applied: Contract) -> None:
    """What the others measure of it is judged, and may fail; it passes a window after all that report apply it."""
    for value, status in ((1e-4, Status.INCONCLUSIVE), (0.5, Status.FAIL)):
        evaluator = evaluator_of(SERVED, columns=columns)
        right, wrong = Reporting(SERVED), Reporting(applied, "1")
        for step in range(6):
            at = NOW + 10.0 * step
            take(evaluator, at, right.request(at, value), wrong.request(at))
        found = judged(evaluator, at)
        assert found["code"][0] is status
        if status is Status.FAIL:
            continue
        assert found["all"][0] is Status.PASS
        assert "no PASS" in found["code"][1]
        assert (
            "a recorder applies version 2 of the contract, where slice code is defined differently" in found["code"][1]
        )
        take(evaluator, at + 10.0, right.request(at + 10.0), applying(applied, info_request(at + 10.0, 0, "1")))
        assert judged(evaluator, at + 10.0)["code"][0] is Status.INCONCLUSIVE
        at += SERVED.observability.window + 20.0
        take(evaluator, at, right.request(at))
        assert judged(evaluator, at)["code"][0] is Status.PASS


@pytest.mark.slow
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("change", [{"unit": "prompt"}, {"unit": "sequence"}, {"cap": 0.5}, {"metric": "k3"}])
def test_a_clause_for_which_some_recorders_measure_something_else_does_not_pass(
    columns: bool, change: dict[str, Any]
) -> None:
    """What the others measure of it may fail; it passes a window after all that report measure it."""
    other = {"id": "ratio", "metric": "support_deficit", "unit": "token", "limit": 0.5}
    served = make_contract(statistical=[CLAUSE, other])
    applied = make_contract(version=2, statistical=[{**CLAUSE, **change}, other])
    for value, status in ((1e-4, Status.INCONCLUSIVE), (0.5, Status.FAIL)):
        evaluator = evaluator_of(served, columns=columns)
        right, wrong = Reporting(served), Reporting(applied, "1")
        ratios = Sender("kc.drift.ratio", start=NOW - 1.0)
        for step in range(6):
            at = NOW + 10.0 * step
            take(evaluator, at, right.request(at, value), applying(applied, info_request(at, 1, wrong.instance)))
            take(evaluator, at, applying(served, ratios.request(at, np.full(5000, 1.0))))
        found = {verdict.cell[1:3]: verdict for verdict in verdicts_of(evaluator, at)}
        assert {found["token-tv", slice].status for slice in ("all", "code")} == {status}
        assert found["ratio", "all"].status is Status.PASS
        if status is Status.FAIL:
            continue
        assert (
            "no PASS, because an assumption does not hold: a recorder applies version 2 of the contract, where clause "
            "token-tv measures something else or is missing; the evaluator has version 3; restart the recorder with "
            "the contract that is served" in found["token-tv", "all"].reason
        )
        at += 10.0
        take(evaluator, at, right.request(at), applying(applied, info_request(at, 0, "1")))
        assert {v.status for v in verdicts_of(evaluator, at) if v.cell.clause == "token-tv"} == {Status.INCONCLUSIVE}
        at += served.observability.window + 20.0
        take(evaluator, at, right.request(at))
        assert {v.status for v in verdicts_of(evaluator, at) if v.cell.clause == "token-tv"} == {Status.PASS}


def test_a_clause_that_the_recorders_contract_lacks_names_the_restart_that_it_takes() -> None:
    """The clause was added to the evaluator's contract alone."""
    added = {"id": "tails", "metric": "abs_log_ratio", "statistic": "fraction > 0.5", "unit": "prompt", "limit": 0.05}
    served, applied = make_contract(statistical=[CLAUSE, added]), make_contract(version=2, statistical=[CLAUSE])
    evaluator, recorder = Evaluator([served]), Reporting(applied)
    take(evaluator, NOW, recorder.request(NOW))
    (reason,) = {v.reason for v in verdicts_of(evaluator, NOW) if v.cell.clause == "tails"}
    assert reason == (
        "nothing received for kc.drift.abs_log_ratio_by_prompt yet; a recorder applies version 2 of the contract, "
        "where clause tails measures something else or is missing; the evaluator has version 3; restart the recorder "
        "with the contract that is served"
    )


@pytest.mark.parametrize("applied", [NEWER, RENAMED, None])
def test_the_same_slices_of_another_version_are_judged(applied: Contract | None) -> None:
    """A limit is changed without a restart of trainers; a sender that says nothing of its contract is believed."""
    evaluator, recorder = Evaluator([SERVED]), Reporting(applied)
    for step in range(6):
        take(evaluator, NOW + 10.0 * step, recorder.request(NOW + 10.0 * step))
    assert {status for status, _ in judged(evaluator, NOW + 50.0).values()} == {Status.PASS}
    assert evaluator.missing("policy", NOW + 50.0) == []


@pytest.fixture
def few_recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than 512 are told apart."""
    monkeypatch.setattr("kc_otel.judge.recorders._MAX_RECORDERS", 512)


@pytest.mark.usefixtures("few_recorders")
def test_recorders_that_restart_for_ever_or_are_forged_are_bounded_and_new_ones_are_told_apart() -> None:
    """The ones heard longest ago are told apart no longer: nobody knows whether they ended, and no name is odd."""
    recorders = Recorders(heartbeat=60.0, window=300.0)
    for number in range(750):
        recorders.hear(f"{number % 3}" * 12, f"r{number}", LastReport(NOW + number), done=False)
    kept = {name for senders in recorders.by_version.values() for name in senders}
    assert sum(map(len, recorders.by_version.values())) <= 512 + 3
    assert {"r747", "r748", "r749"} <= kept
    assert not {"r0", "r1", "r2"} & kept
    for number in range(750):
        recorders.hear(f"{number % 3}" * 12, f"r{number}", LastReport(NOW + 750.0), done=True)
    assert sum(map(len, recorders.gone.values())) <= 512 + 3
    assert not recorders.all_ended("0" * 12, NOW, 3600.0)
    recorders.hear("0" * 12, "new", LastReport(NOW + 1250.0), done=False)
    count, said = recorders.silent_members("0" * 12, lambda last: NOW + 1250.0 - last, 1e6)
    assert (count, said.isprintable(), "others for" in said) == (1, True, True)
    recorders.hear("0" * 12, "new", LastReport(NOW + 3750.0), done=True)
    assert recorders.gone["0" * 12].keys() == {"new"}, "when the version was left last is all that the others said"


@pytest.mark.usefixtures("few_recorders")
def test_what_recorders_measure_is_bounded() -> None:
    """Nothing is kept of those that are forged, forgotten or shut down; those that owe something stand for others."""
    recorders, key = Recorders(heartbeat=60.0, window=300.0), SeriesKey("kc.drift.tv_token", "code", "a" * 12, "b" * 12)
    for number in range(750):
        recorders.hear("b" * 12, f"r{number}", LastReport(NOW + number), done=False)
        recorders.observe(f"r{number}", [key], NOW + number)
        recorders.observe(f"forged{number}", [key], NOW + number)
        if number % 250 == 249:  # more often than once a window
            recorders.owe({key: NOW + number}, [key])
    assert len(recorders.measured) <= 512
    assert recorders.owed[key].keys() == {*recorders.measured, "\0"}
    for number in range(750):
        recorders.hear("b" * 12, f"r{number}", LastReport(NOW + 750.0), done=True)
        recorders.move(f"r{number}", {"b" * 12: True}, NOW + 750.0)
    assert recorders.measured == {}
    assert recorders.owed[key].keys() == {"\0", "\0\0"}
    recorders.owe({}, [])
    assert recorders.owed == {}


def test_a_recorder_of_a_version_that_is_forgotten_is_still_known_by_another() -> None:
    """What it measured of the other is, too: it owes that."""
    recorders, key = Recorders(heartbeat=60.0, window=300.0), SeriesKey("kc.drift.tv_token", "code", "a" * 12, "b" * 12)
    recorders.hear("old", "gpu-0", LastReport(NOW), done=False)
    recorders.hear("b" * 12, "gpu-0", LastReport(NOW), done=False)
    recorders.observe("gpu-0", [key], NOW)
    for number in range(255):
        recorders.hear(f"{number:012x}", "many", LastReport(NOW), done=False)
    assert "old" not in recorders.by_version
    recorders.owe({key: NOW}, [key])
    assert recorders.unheard(key, lambda _: 0.0, NOW + 1e6)


def test_a_recorder_moved_when_it_first_said_so_until_it_is_back_or_shuts_down() -> None:
    recorders = Recorders(heartbeat=60.0, window=300.0)
    for at, said, moved in (
        (NOW, {"a": True, "b": False}, ["a"]),
        (NOW + 100.0, {"a": True, "b": False}, ["a"]),
        (NOW + 200.0, {"a": False, "b": True}, ["b"]),
        (NOW + 300.0, {"a": True}, []),
    ):
        for version, left in said.items():
            recorders.hear(version, "gpu-0", LastReport(at), done=left)
        recorders.move("gpu-0", said, at)
        assert [version for version in "ab" if recorders.moved_since(version)] == moved
        assert not recorders.moved_since("a", NOW + 50.0)


@pytest.mark.usefixtures("few_recorders")
def test_recorders_that_move_are_bounded_and_none_of_them_is_taken_for_ended() -> None:
    """Forged ones too: of versions that are forgotten nothing is kept, and those beyond the bound stand for others."""
    recorders = Recorders(heartbeat=60.0, window=300.0)

    def tell(sender: str, done: dict[str, bool]) -> None:
        for version, left in done.items():
            recorders.hear(version, sender, LastReport(NOW), done=left)
        recorders.move(sender, done, NOW)

    tell("many", {f"{number:012x}": True for number in range(600)} | {"b" * 12: False})
    assert set(recorders.gone) <= set(recorders.by_version)
    for number in range(750):
        tell(f"r{number}", {"a" * 12: True, "c" * 12: True, "b" * 12: False})
    assert sum(map(len, recorders.gone.values())) <= 512 + 256
    for number in range(750):
        tell(f"r{number}", {"a" * 12: False})
    assert recorders.moved_since("a" * 12), "those beyond the bound have not come back"


VLLM = {"engine": "vllm", "engine.version": "0.32", "dtype": "bfloat16"}


def info(version, role="inference", **more):
    return KernelInfo(role, version, VLLM | more, 0.0)


READ = {"kv_cache_dtype": "auto", "compile": "eager"}
"""Fields that vLLM always reports of itself."""


def test_kernels_that_would_be_called_alike_are_named_by_what_differs():
    """Of whatever role; those that are called otherwise are not made longer."""
    kernels = [
        info("aa", "train", kv_cache_dtype="auto", attention="FLASH_ATTN"),
        info("bb", kv_cache_dtype="fp8", attention="FLASH_ATTN"),
        KernelInfo("inference", "cc", VLLM | {"dtype": "fp8", "attention": "TRITON_ATTN"}, 0.0),
        KernelInfo("inference", "dd", {}, 0.0),
    ]
    assert list(kernel_names(kernels).values()) == [
        "vllm 0.32 bfloat16, kv_cache_dtype auto (aa)", "vllm 0.32 bfloat16, kv_cache_dtype fp8 (bb)",
        "vllm 0.32 fp8 (cc)", "dd",
    ]  # fmt: skip
    assert kernel_names([info("aa"), info("bb", attention="x")])["inference", "aa"] == (
        "vllm 0.32 bfloat16, attention not reported (aa)"
    )


@pytest.mark.parametrize(
    ("declared", "reported", "said"),
    [
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}, ("kv_cache_dtype fp8 is declared, and auto reported",)),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, ()),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}, ()),
        ({"kv_cache_dtype": "fp8"}, {}, ()),
        ({"dtype": "bf16"}, {"dtype": "torch.bfloat16"}, ()),
        ({"dtype": "fp8"}, {"quantization": "fp8"}, ()),
        ({"dtype": "fp8"}, {}, ("dtype fp8 is declared, and bfloat16 reported",)),
        ({"kv_cache_dtype": "bf16"}, {"kv_cache_dtype": "auto"}, ()),
        ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "bfloat16"}, ()),
        ({"attention": "flash-attn"}, {"attention": "FLASH_ATTN"}, ()),
        ({"quantization": "awq"}, READ | {"quantization": "awq_marlin"}, ()),
        ({"quantization": "awq"}, READ | {"quantization": "auto_awq"}, ()),
        ({"quantization": "fp8"}, READ, ("quantization fp8 is declared, and none reported",)),
        ({"quantization": "fp8"}, {"kv_cache_dtype": "auto"}, ()),
    ],
)
def test_what_is_reported_is_held_against_what_is_declared(declared, reported, said):
    """In the names that engines have for one thing; what is not reported is no difference.

    Only vLLM's own configuration would name a quantisation, so that a flag that was forgotten is found.
    """
    assert declared_otherwise(KernelSpec(engine="vllm", **declared), VLLM | reported) == said


def test_one_kernel_on_both_sides_is_not_the_two_that_are_declared():
    """A roll-out whose flag was forgotten is the stable kernel again; where one is declared, it is what was meant."""
    bf16, fp8 = (KernelSpec(engine="vllm", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    stable, candidate = info("aa", "train"), info("aa")
    assert unlike_declared(KernelSpecs(train=bf16, inference=fp8), candidate, [stable, candidate]) == (ONE_KERNEL,)
    assert unlike_declared(KernelSpecs(train=bf16, inference=fp8), candidate, [info("bb", "train"), candidate]) == ()
    assert unlike_declared(KernelSpecs(train=bf16, inference=bf16), candidate, [stable, candidate]) == ()


def test_the_training_kernel_that_slices_are_routed_to_is_no_forgotten_flag():
    """It serves beside the version that is judged; where it serves alone, it may be what was meant to be another."""
    train, version = info("aa", "train"), info("bb")
    assert stand_in([train, version, info("aa")]) == {"aa"}
    assert stand_in([train, info("aa")]) == stand_in([train, version]) == frozenset()
