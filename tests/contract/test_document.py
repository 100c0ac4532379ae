"""YAML: what is read as what, and what is refused at which line."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.contract.yaml_document import MAX_DEPTH, parse


@pytest.mark.parametrize(
    ("written_as", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("off", "off"),
        ("NO", "NO"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("2026-11-02", "2026-11-02"),
        ("12:30:45", "12:30:45"),
        ("1_000", "1_000"),
        ("007", 7),
        ("-12", -12),
        ("0x1F", 31),
        ("0o17", 15),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("5.", 5.0),
        ("1.0", 1.0),
        ("'1.0'", "1.0"),
        ('"true"', "true"),
        ("kernel-contract/v1", "kernel-contract/v1"),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(written_as, value):
    document, problems = parse(f"key: {written_as}", "c.yaml")
    assert problems == []
    assert document is not None
    assert document.data == {"key": value}
    assert type(document.data["key"]) is type(value)


def test_the_key_on_stays_text():
    """`on:` is a key of every step and must not become True."""
    document, _ = parse("on: fail\nyes: 1\n1: 2\nnull: 3", "c.yaml")
    assert document is not None
    assert list(document.data) == ["on", "yes", "1", "null"]


def test_lines_of_keys_values_and_items():
    document, _ = parse("a:\n  b: 1\n  c:\n  - x\n  -\n    d: 2\n", "c.yaml")
    assert document is not None
    assert [document.line(loc) for loc in [("a",), ("a", "b"), ("a", "c", 0), ("a", "c", 1, "d")]] == [1, 2, 4, 6]
    assert document.line(("a", "c", 1, "missing")) == 6
    assert document.line(("nowhere", 3)) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x 1", "c.yaml:1: a: anchors such as &x are not supported"),
        ("a: 1\nb: *x", "c.yaml:2: aliases such as *x are not supported; write the value out"),
        ("a: 1\n<<: {b: 2}", "c.yaml:2: merge keys (<<) are not supported"),
        ("a: !!python/object:os.system x", "c.yaml:1: a: tags such as !!python/object:os.system are not supported"),
        ("a: !secret x", "c.yaml:1: a: tags such as !secret are not supported"),
        ("!!map\na: 1", "c.yaml:1: tags such as !!map are not supported"),
        ("a:\n  b: 1\n  c: 2\n  b: 3", "c.yaml:4: a.b: duplicate key, first on line 2; remove one of the two"),
        ("a: 1\n---\nb: 2", "c.yaml:2: a second document starts here"),
        ("a: 1\n--- 3", "c.yaml:2: a second document starts here"),
        ("- a\n- b", "c.yaml:1: the file is a list; a contract is a mapping"),
        ("just text", "c.yaml:1: the file is a single value; a contract is a mapping"),
        ("", "c.yaml: the file is empty; a contract is a mapping"),
        ("# only a comment\n", "c.yaml: the file is empty; a contract is a mapping"),
        ("~", "c.yaml: the file is empty; a contract is a mapping"),
        ("a: b: c", "c.yaml:1: not valid YAML: a second colon on one line"),
        ("a: 1\n\tb: 2", "c.yaml:2: not valid YAML: a tab; indent with spaces"),
        ("a: [1, 2", "c.yaml:1: not valid YAML: "),
        ('a: 1\nb: "unclosed', "c.yaml:2: not valid YAML: "),
        ("a: \x00", "c.yaml:1: not valid YAML: the character U+0000 is not allowed"),
        ("a: 1\nb: \ud800", "c.yaml:2: not valid YAML: the character U+D800 is not allowed"),
        ('a: "\\ud800"', "c.yaml:1: a: half of a surrogate pair is not a character"),
        ('a: "\\UFFFFFFFF"', "c.yaml: not valid YAML: "),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1", "c.yaml: not valid YAML: "),
        ("a: .inf", "c.yaml:1: a: .inf is not finite; write a finite number"),
        ("a: [1, .NaN]", "c.yaml:1: a[1]: .NaN is not finite; write a finite number"),
        ("a: 1e999", "c.yaml:1: a: 1e999 is not finite; write a finite number"),
        ("a: " + "9" * 5000, "c.yaml:1: a: the number has 5000 characters; write at most 40"),
        ("? [a]\n: 1", "c.yaml:1: a key is not plain text; write a name"),
        ("{[a]: 1}", "c.yaml:1: a key is not plain text; write a name"),
        ("a: 1\n? \n: 2", "c.yaml:2: the key before the colon is missing; write a name"),
    ],
)
def test_what_a_contract_may_not_hold_is_refused_at_its_line(text, problem):
    _, problems = parse(text, "c.yaml")
    assert len(problems) == 1
    assert str(problems[0]).startswith(problem)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused_quickly_and_read_up_to_the_limit(opening):
    started = time.monotonic()
    document, problems = parse(opening * 100_000, "c.yaml")
    assert time.monotonic() - started < 5
    assert document is None
    assert str(problems[0]) == f"c.yaml:1: nested more than {MAX_DEPTH} levels deep; a contract needs six"
    read = [parse("a: " + "[" * depth + "]" * depth, "c.yaml")[0] for depth in (MAX_DEPTH - 1, MAX_DEPTH)]
    assert [found is not None for found in read] == [True, False]


@given(st.text(alphabet=st.sampled_from("ab:-?[]{},&*!|>'\"%@`#~<\\ \n\t0.\ud800\ufeff\x85"), max_size=40))
def test_any_text_gives_a_document_or_a_problem(text):
    document, problems = parse(text, "c.yaml")
    assert document is not None or problems
