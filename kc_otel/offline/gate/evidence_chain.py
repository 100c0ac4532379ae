"""A chain over evidence and recordings: each link holds a file's digests and the digest of the link before.

Who changes, drops, swaps or inserts anything breaks every later link. Who can rewrite the whole chain can make another
one, and who cuts its end leaves a shorter one: so keep the last link's digest, its head, elsewhere.

A file's digest is one of a chain too, over pieces of 1 MiB: d[i] = SHA-256(d[i-1] + piece[i]). A file that changed is
thereby told with the bytes at which it did, and one that only grew, such as a .jsonl that is still written, may be
added again: its earlier link stays good.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.json_text import read_json_text
from kc_otel.judge.escalation.webhook_body import rfc3339
from kc_otel.offline.gate.evidence import EvidenceError, verify_evidence

__all__ = ["ChainError", "add_to_chain", "verify_chain"]

_FIELDS: Final = frozenset({"number", "time", "previous", "file", "size", "pieces", "link"})
_PIECE: Final = 1 << 20
_START: Final = "0" * 64


class ChainError(ValueError):
    """A chain, or a file in it, is not what was added; the message names the first link that is broken."""


def add_to_chain(chain: Path, files: Sequence[Path], now: float) -> str:
    """Append a link for each file; the links before are verified, their files are not read.

    Args:
        chain: The chain, a .jsonl file; made where there is none.
        files: What to add; kept by their paths from the chain's folder.
        now: Unix time, seconds.

    Returns:
        The head: the digest of the last link.

    Raises:
        ChainError: If the chain is broken; nothing is appended.
        OSError: If a file cannot be read, or the chain not be written.
    """
    measured = [(os.path.relpath(file, chain.parent), *_digests(file)) for file in files]
    chain.parent.mkdir(parents=True, exist_ok=True)
    with chain.open("a+b") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # two gates that end at once
        out.seek(0)
        links = list(_links(chain, out.read()))
        head, lines = (links[-1]["link"] if links else _START), []
        for number, (file, size, pieces) in enumerate(measured, len(links) + 1):
            link = {
                "number": number,
                "time": rfc3339(now),
                "previous": head,
                "file": Path(file).as_posix(),
                "size": size,
                "pieces": pieces,
            }
            head = _sealed(link)
            lines.append(json.dumps(link | {"link": head}, sort_keys=True) + "\n")
        out.write("".join(lines).encode())
        out.flush()
        os.fsync(out.fileno())
    return head


def verify_chain(chain: Path, head: str | None = None) -> tuple[int, str]:
    """Walk a chain from its first link, with every file that it names; evidence has to verify by itself too.

    Args:
        chain: The chain.
        head: The digest that its last link has to have, where it was kept; None takes the chain's end on trust.

    Returns:
        The number of links, and the head.

    Raises:
        ChainError: If anything is not as it was added.
        OSError: If a file cannot be read, other than one that is not there.
    """
    links = list(_links(chain, chain.read_bytes()))
    if not links:
        raise ChainError(f"{chain}: has no link")
    last = {link["file"]: link["number"] for link in links}
    for link in links:
        _verify_file(chain, link, later=last[link["file"]] > link["number"])
    found = str(links[-1]["link"])
    if head is not None and found != head.removeprefix("sha256:"):
        at = next((link["number"] for link in links if link["link"] == head), None)
        why = (
            f"{len(links) - at} links were added since"
            if at
            else "links are missing at its end, or it is another chain"
        )
        raise ChainError(f"{chain}: ends with {found[:12]}, not with {head[:12]}: {why}")
    return len(links), found


def _links(chain: Path, data: bytes) -> Iterator[Mapping[str, Any]]:
    """Links in order, each of which follows from the one before."""
    previous = _START
    for number, line in enumerate(data.split(b"\n")[:-1] if data.endswith(b"\n") else data.split(b"\n"), 1):
        if number == 1 and not line:
            return
        where = f"{chain}:{number}: link {number}"
        try:
            link = read_json_text(line)
        except ValueError:
            raise ChainError(f"{where} is no JSON: it was cut or edited") from None
        if not isinstance(link, dict) or link.keys() != _FIELDS or not _shaped(link):
            raise ChainError(f"{where} has not the fields that kc-otel writes")
        if link["link"] != _sealed({name: value for name, value in link.items() if name != "link"}):
            raise ChainError(f"{where} was edited: its digest is of something else")
        if link["previous"] != previous or link["number"] != number:
            raise ChainError(
                f"{where} follows {link['previous'][:12]} as number {link['number']}, not {previous[:12]}: a link was "
                "dropped, swapped or inserted before it"
            )
        previous = link["link"]
        yield link


def _shaped(link: Mapping[str, Any]) -> bool:
    texts = (link["time"], link["previous"], link["file"], link["link"], *_listed(link["pieces"]))
    numbers = (link["number"], link["size"])
    return all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)


def _listed(pieces: Any) -> list[Any]:
    return pieces if isinstance(pieces, list) else [None]


def _verify_file(chain: Path, link: Mapping[str, Any], *, later: bool) -> None:
    where, file = f"{chain}:{link['number']}: {link['file']}", chain.parent / link["file"]
    if not file.is_file():
        raise ChainError(f"{where} is not there")
    if (size := file.stat().st_size) < link["size"]:
        raise ChainError(f"{where} has {size:,} bytes, and had {link['size']:,} when it was added: it was cut")
    _, pieces = _digests(file, link["size"])
    pairs = zip(pieces, link["pieces"], strict=False)
    if len(pieces) != len(link["pieces"]) or pieces[-1:] != link["pieces"][-1:]:
        first = _PIECE * next((at for at, (now, then) in enumerate(pairs) if now != then), len(pieces))
        raise ChainError(f"{where} was changed between bytes {first:,} and {min(first + _PIECE, link['size']):,}")
    if size > link["size"] and not later:
        raise ChainError(f"{where} has {size - link['size']:,} bytes more than were added: add it again")
    if file.suffix == ".json" and not later:
        record = _evidence(file)
        if record is not None:
            try:
                verify_evidence(record)
            except EvidenceError as error:
                raise ChainError(f"{where}: {error}") from None


def _evidence(file: Path) -> Mapping[str, Any] | None:
    try:
        record = read_json_text(file.read_bytes())
    except ValueError:
        return None
    return record if isinstance(record, dict) and "checksum" in record else None


def _digests(file: Path, most: int = sys.maxsize) -> tuple[int, list[str]]:
    """How many bytes a file has, `most` at most, and the chained digests of their pieces."""
    size, pieces, before = 0, [], b""
    with file.open("rb") as data:
        while piece := data.read(min(_PIECE, most - size)):
            size += len(piece)
            before = hashlib.sha256(before + piece).digest()
            pieces.append(before.hex())
    return size, pieces


def _sealed(link: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(link, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
