"""Loading contracts: every problem at its line, and hashes that follow the content alone."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import MAX_BYTES, check, check_all, load, load_all, load_text
from kc_otel.contract.model import Contract
from kc_otel.contract.schema import json_schema

_SCHEMA = json_schema()
_SECTIONS = list(_SCHEMA["properties"])
_KEYS = sorted({key for place in (_SCHEMA, *_SCHEMA["$defs"].values()) for key in place.get("properties", {})})
_WORDS = st.sampled_from([*_KEYS, "kernel-contract/v1", "tv_token", "k3", "mean", "p99", "5m", "fail", "notify", "all"])
_TEXTS = st.one_of(_WORDS, st.text(max_size=5))
_NESTED = st.recursive(
    st.one_of(_TEXTS, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner)),
    max_leaves=25,
)


def test_a_contract_is_loaded_from_a_file(tmp_path, written):
    path = tmp_path / "c.yaml"
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + written().encode())
        assert load(path) == load(str(path)) == load_text(written())


def test_errors_carry_every_problem_in_order(written):
    with pytest.raises(ContractError) as caught:
        load_text(written("typo: 1", "slices: {x: {where: {}}}"), "policy.yaml")
    assert [problem.line for problem in caught.value.problems] == [5, 6]
    assert str(caught.value).count("\n") == 1
    assert str(caught.value).startswith("policy.yaml:5: typo: unknown key")


def test_a_warning_does_not_refuse_a_contract(written):
    text = written("statistical: [{id: a, metric: tv_token, statistic: p99.9, limit: 0.1}]", clause=False)
    assert load_text(text).name == "policy-7b"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("nowhere.yaml", "no such file"),
        (".", "a folder; give the path of one contract"),
        ("a\0b", "cannot be opened"),
        ("/dev/zero", "too large"),
        (1 << 40, "too large (1,099,511,627,776 bytes); a contract has at most 256 KiB"),
        (MAX_BYTES + 1, "too large (262,145 bytes); a contract has at most 256 KiB"),
        (b"a: \xff\xfe", "not UTF-8 (byte 3, line 1); save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "not UTF-8 (byte 0, line 1); save the file as UTF-8"),
        (b"a: 1\nb: \xe4", "not UTF-8 (byte 8, line 2); save the file as UTF-8"),
    ],
)
def test_what_cannot_be_read_is_a_problem_without_a_line(tmp_path, content, said):
    """Of a file by its name, by its size, which is not read, or by what it holds."""
    path = tmp_path / (content if isinstance(content, str) else "c.yaml")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, int):
        path.touch()
        os.truncate(path, content)
    started = time.monotonic()
    (problem,) = check(path).problems
    assert str(problem).startswith(f"{path}: {said}")
    assert time.monotonic() - started < 30  # a terabyte takes longer
    with pytest.raises(ContractError, match=re.escape(said)):
        load(path)


def test_a_file_that_may_not_be_read_is_a_problem(tmp_path, monkeypatch):

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ContractError, match="cannot be read: Permission denied"):
        load(tmp_path / "c.yaml")


def test_a_file_at_the_limit_is_read(tmp_path, written):
    path, text = tmp_path / "c.yaml", written()
    path.write_text(text + "#" * (MAX_BYTES - len(text)), encoding="utf-8")
    assert load(path).name == "policy-7b"


def test_a_folder_is_walked(tmp_path, written):
    for name in ("b.yaml", "a.yml", "sub/c.yaml", ".hidden.yaml", ".git/d.yaml", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(written().replace("policy-7b", path.stem.strip(".") or "x"), encoding="utf-8")
    assert [contract.name for contract in load_all([tmp_path])] == ["a", "b", "c"]


def test_a_folder_without_contracts_is_a_problem(tmp_path):
    """Silence would look like success."""
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    with pytest.raises(ContractError, match="the folder has no contract"):
        load_all([tmp_path])


def test_a_file_given_twice_is_read_once(tmp_path, written):
    path = tmp_path / "c.yaml"
    path.write_text(written(), encoding="utf-8")
    assert len(load_all([tmp_path, path, os.path.relpath(path)])) == 1


def test_problems_of_all_files_come_together(tmp_path, written):
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(written("x: 1", "y: 2"), encoding="utf-8")
    with pytest.raises(ContractError) as caught:
        load_all([tmp_path / "b.yaml", tmp_path / "a.yaml", tmp_path / "c.yaml"])
    where = [(Path(problem.file).name, problem.line) for problem in caught.value.problems]
    assert where == [("a.yaml", 5), ("a.yaml", 6), ("b.yaml", 5), ("b.yaml", 6), ("c.yaml", 0)]


def test_two_contracts_of_one_name_are_an_error(tmp_path, written):
    """Metrics are told apart by the contract's name."""
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(written(), encoding="utf-8")
    first, second = check_all([tmp_path])
    assert first.contract is not None
    assert second.contract is None
    assert "'policy-7b' is already the name of" in str(second.problems[0])


def _judged(data):
    """Whether JSON, which is YAML, gives a contract; whatever comes out is a contract or a ContractError."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        return isinstance(load_text(text), Contract)
    except ContractError as error:
        return bool(error.problems) and all(map(str, error.problems))


@given(st.sampled_from(_SECTIONS), _NESTED)
def test_any_section_may_be_anything(section, data):
    sound = {
        "apiVersion": "kernel-contract/v1",
        "kind": "KernelContract",
        "metadata": {"name": "a", "version": 1, "owner": "o"},
        "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
        "statistical": [{"id": "tv", "metric": "tv_token", "limit": 0.1}],
    }
    assert _judged({**sound, section: data})


@pytest.mark.slow
def test_a_hostile_file_of_the_largest_size_ends_soon(written):
    clauses = "".join(
        f"  - {{id: c{index}, metric: tv_tokem, limit: 9, slices: {{x{index}: 5}}}}\n" for index in range(4000)
    )
    slices = "".join(f"  s{index}: {{where: {{a: {index}}}}}\n" for index in range(500))
    unknown = "".join(f"k{index}: 1\n" for index in range(4000))
    for text in (f"statistical:\n{clauses}", f"slices:\n{slices}{unknown}"):
        assert len(text) < MAX_BYTES
        started = time.process_time()
        with pytest.raises(ContractError):
            load_text(written(clause=False) + text)
        assert time.process_time() - started < 20


_TEXT = """
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: a, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
assumptions: {reward_range: [0, 1], clip: 0.2}
slices: {long: {where: {n: ">= 8192", task: code}}}
numerical: [{id: half-range, metric: logit_half_range, statistic: p99, limit: 0.15}]
statistical: [{id: tv, metric: tv_token, limit: 0.007, slices: {long: 0.035}}]
runtime: [{id: ttft, metric: gen_ai.server.time_to_first_token, limit: 800ms}]
observability: {window: 5m, sampling: 0.5}
escalation: [{on: fail, for: 90s, do: [notify, {route: train-kernel}]}]
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("limit: 0.007, slices: {long: 0.035}", "limit: 0.5, description: why, slices: {long: 0.1}", set()),
        ("metric: tv_token,", "metric: tv_token, statistic: mean, unit: prompt,", set()),
        ("metric: tv_token,", "metric: k3,", {("tv", "all"), ("tv", "long")}),
        ("metric: tv_token,", "metric: tv_token, unit: sequence,", {("tv", "all"), ("tv", "long")}),
        ("metric: tv_token,", "metric: tv_token, cap: 0.5,", {("tv", "all"), ("tv", "long")}),
        ("statistic: p99,", "statistic: p99.9,", {("half-range", "all"), ("half-range", "long")}),
        ('n: ">= 8192"', 'n: ">= 4096"', {("half-range", "long"), ("tv", "long"), ("ttft", "long"), ("drift", "long")}),
        ("reward_range: [0, 1]", "reward_range: [0, 2]", {("drift", "all"), ("drift", "long")}),
        ("id: tv,", "id: tv2,", {("tv", "all"), ("tv", "long")}),
    ],
)
def test_a_clause_measures_the_same_until_something_that_defines_it_changes(old, new, changed):
    """Its limits do not; its metric, statistic, unit, cap, slice and the assumptions that it is made of do."""
    text = _TEXT.replace("limit: 0.007, slices: {long: 0.035}}", "limit: 0.007, slices: {long: 0.035}}, {id: drift, "
                         "metric: reward_drift_bound, limit: 0.05}")  # fmt: skip
    before = load_text(text, "a.yaml").quantity_digests
    after = load_text(text.replace(old, new), "a.yaml").quantity_digests
    assert {where for where, digest in before.items() if after.get(where) != digest} == changed
    assert load_text(text, "a.yaml").recorded_digests.keys() == {id for id, _ in before} - {"ttft"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("window: 5m", "window: 300s"),
        ("for: 90s", "for: 1m30s"),
        ("limit: 800ms", "limit: 0.8"),
        ("limit: 0.007", "limit: 0.7%"),
        ("limit: 0.007", "limit: '7e-3'"),
        ("observability:", "# a comment\nobservability:"),
        ("metric: tv_token,", "metric: tv_token, statistic: mean, unit: prompt,"),
        ("statistic: p99,", "statistic: p99.0,"),
        ("{name: a, version: 1, owner: o}", "{owner: o, name: a, version: 1}"),
        ('{n: ">= 8192", task: code}', '{task: [code], n: ">=8192"}'),
        ("sampling: 0.5", "sampling: 0.5, confidence: 0.99, heartbeat: 60s"),
        ("kind: KernelContract\n", "kind: 'KernelContract'\n"),
        ("{engine: torch}", "{engine: torch, dtype: null}"),
        ("kind:", "promotion: {windows: 3, steps: [1%, 5%, 25%], failure_limit: 1, approve: [], skip: []}\nkind:"),
    ],
)
def test_spelling_order_and_comments_do_not_count(old, new):
    assert old in _TEXT
    assert load_text(_TEXT.replace(old, new)).hash == load_text(_TEXT).hash
