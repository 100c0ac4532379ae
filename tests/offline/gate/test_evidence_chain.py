"""A chain over evidence and recordings: every attack is found, and the first broken link is named."""

from __future__ import annotations

import json
import re
import threading
import time

import numpy as np
import pytest

from kc_otel.cli import app
from kc_otel.offline.gate import evidence_chain
from kc_otel.offline.gate.evidence_chain import ChainError, add_to_chain, verify_chain

MIB = 1 << 20


@pytest.fixture
def chain(tmp_path):
    """Five recordings of 3.2 MiB each, a link for each."""
    rng = np.random.default_rng(0)
    for name in "abcde":
        (tmp_path / f"{name}.npz").write_bytes(rng.bytes(3 * MIB + 200_000))
    path = tmp_path / "chain.jsonl"
    for name in "abcde":
        add_to_chain(path, [tmp_path / f"{name}.npz"], 1e9)
    return path


def edited(chain, change):
    lines = chain.read_text().splitlines()
    chain.write_text("".join(line + "\n" for line in change(lines)))


def test_what_nobody_touched_is_sound(chain):
    """Five links, and the head that the last one has."""
    count, head = verify_chain(chain)
    assert (count, len(head)) == (5, 64)
    assert verify_chain(chain, head) == verify_chain(chain, f"sha256:{head}") == (5, head)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], r":2: link 2 follows \w+ as number 3"),
        (lambda lines: [*lines[:2], *lines[3:]], r":3: link 3 follows \w+ as number 4"),
        (lambda lines: lines[1:], r":1: link 1 follows \w+ as number 2"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], r":4: link 4 follows \w+ as number 3"),
        (lambda lines: [*lines[:4], lines[4][:-30]], r":5: link 5 is no JSON"),
        (lambda lines: [*lines[:1], lines[1].replace("b.npz", "a.npz"), *lines[2:]], r":2: link 2 was edited"),
        (lambda lines: [*lines[:1], "[]", *lines[2:]], r":2: link 2 has not the fields"),
        (lambda lines: [*lines[:1], "", *lines[2:]], r":2: link 2 is no JSON"),
        (lambda lines: [lines[0].replace('"size": ', '"size": "x", "a": '), *lines[1:]], r":1: link 1 has not the f"),
        (lambda _: [], "has no link"),
    ],
    ids=["swap", "drop", "behead", "repeat", "cut", "edit", "list", "blank", "shape", "empty"],
)
def test_a_changed_chain_names_its_first_broken_link(chain, change, said):
    """Swapped, dropped, repeated, cut, edited: the line and the link are said; nothing is appended to it."""
    edited(chain, change)
    with pytest.raises(ChainError, match=said):
        verify_chain(chain)
    if chain.read_text():
        with pytest.raises(ChainError, match=said):
            add_to_chain(chain, [chain.parent / "a.npz"], 1e9)


def test_a_part_of_another_chain_does_not_fit(chain, tmp_path):
    """Links of a second chain over the same files, spliced in, follow from others."""
    other = tmp_path / "other.jsonl"
    for name in "edcba":
        add_to_chain(other, [tmp_path / f"{name}.npz"], 2e9)
    tail = other.read_text().splitlines()[3:]
    edited(chain, lambda lines: [*lines[:3], *tail])
    with pytest.raises(ChainError, match=r":4: link 4 follows"):
        verify_chain(chain)


def test_an_end_that_is_cut_off_takes_the_head_to_see(chain):
    """Without its last links a chain is sound by itself, and not with the head that was kept; nor one that went on."""
    _, head = verify_chain(chain)
    edited(chain, lambda lines: lines[:3])
    _, shorter = verify_chain(chain)
    with pytest.raises(ChainError, match="links are missing at its end"):
        verify_chain(chain, head)
    add_to_chain(chain, [chain.parent / "d.npz"], 1e9)
    with pytest.raises(ChainError, match="1 links were added since"):
        verify_chain(chain, shorter)


@pytest.mark.parametrize("at", [0, MIB - 1, MIB, 3 * MIB + 199_999])
def test_one_byte_of_a_file_is_found_where_it_is(chain, at):
    """A byte that changed is told with its link, its file and its piece of 1 MiB."""
    file = chain.parent / "c.npz"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    first = at // MIB * MIB
    said = f":3: c.npz was changed between bytes {first:,} and {min(first + MIB, len(data)):,}"
    with pytest.raises(ChainError, match=re.escape(said)):
        verify_chain(chain)


def test_a_file_that_is_cut_swapped_or_gone_is_found(chain):
    """Shorter, longer, another's, nobody's."""
    file = chain.parent / "b.npz"
    data = file.read_bytes()
    for content, said in (
        (data[:-1], ":2: b.npz has 3,345,727 bytes, and had 3,345,728 when it was added: it was cut"),
        (data + b"x", ":2: b.npz has 1 bytes more than were added: add it again"),
        ((chain.parent / "a.npz").read_bytes(), ":2: b.npz was changed between bytes 0 and 1,048,576"),
        (None, ":2: b.npz is not there"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ChainError, match=re.escape(said)):
            verify_chain(chain)


def test_a_file_that_grows_may_be_added_again(chain):
    """A .jsonl that is still written is added now and later; what was there at first must still be there."""
    file = chain.parent / "run.jsonl"
    file.write_text("one\n")
    add_to_chain(chain, [file], 1e9)
    file.write_text("one\ntwo\n")
    add_to_chain(chain, [file], 1e9)
    assert verify_chain(chain)[0] == 7
    file.write_text("ONE\ntwo\n")
    with pytest.raises(ChainError, match=r":6: run\.jsonl was changed between bytes 0 and 4"):
        verify_chain(chain)


@pytest.mark.slow
def test_gates_that_end_at_once_make_one_chain(chain, monkeypatch):
    """Eight threads that append at a time lose none: who reads the chain is alone with it until it has written."""
    read = evidence_chain._links

    def slowly(*arguments):
        found = list(read(*arguments))
        time.sleep(0.02)
        return iter(found)

    monkeypatch.setattr(evidence_chain, "_links", slowly)
    file = chain.parent / "a.npz"
    threads = [threading.Thread(target=add_to_chain, args=(chain, [file], 1e9)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify_chain(chain)[0] == 13


CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: served, version: 1, owner: tests}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.2}]
observability: {min_samples: 100}
"""


@pytest.mark.slow
def test_a_gate_appends_to_its_chain_and_verify_walks_it(tmp_path, capsys):
    """Two gates on one chain; a verdict in the first one's evidence is edited with a checksum that fits, and named."""
    from kc_otel.cli.gate_command import register
    from kc_otel.offline.gate.evidence import _checksum

    app.registered_groups.clear()
    register(app)

    def command(*arguments):
        return app(["gate", *map(str, arguments)], standalone_mode=False), capsys.readouterr()

    (tmp_path / "contract.yaml").write_text(CONTRACT)
    rng, chain = np.random.default_rng(0), tmp_path / "chain.jsonl"
    for name in ("one", "two"):
        train = np.log(rng.uniform(0.2, 0.9, (40, 10)))
        noisy = np.minimum(train + 1e-3 * rng.standard_normal(train.shape), 0.0)
        np.savez(tmp_path / f"{name}.npz", train_logprobs=train, inference_logprobs=noisy)
        evidence = ("--evidence", tmp_path / name, "--chain", chain)
        command("run", tmp_path / "contract.yaml", tmp_path / f"{name}.npz", *evidence)
    assert [json.loads(line)["file"] for line in chain.read_text().splitlines()] == [
        "one.npz", "one/evidence.json", "two.npz", "two/evidence.json",
    ]  # fmt: skip
    assert "sound, 4 links" in command("verify", chain)[1].out
    file = tmp_path / "one" / "evidence.json"
    record = json.loads(file.read_text())
    record["verdicts"][0]["samples"] += 1
    record["checksum"] = _checksum({name: value for name, value in record.items() if name != "checksum"})
    file.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    code, printed = command("verify", chain)
    assert code == 1
    assert ":2: one/evidence.json was changed" in printed.err
    assert command("run", tmp_path / "contract.yaml", tmp_path / "one.npz", "--chain", chain)[0] == 2
