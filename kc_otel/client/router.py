"""The router: consults the decision table in the serving process, on every request, without network access or locks.

A daemon thread keeps the table fresh and swaps one reference to an immutable snapshot; readers take that reference and
never wait. When the evaluator is gone the last table stays in force: a route is lifted by a person, never by an outage.
Before the first table, and once the evaluator has been gone for longer than `stale_after`, nothing monitors a version
under test: requests without a pin or a route go to versions that were promoted to full, else to the training kernel.
The last table is in a file too, for a serving process that starts while the evaluator is gone.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from kc_otel.client.poll import Poller
from kc_otel.client.snapshot import NEVER, PROVEN, UNPROVEN, Choice, ServingKernel, Snapshot, compiled
from kc_otel.contract.plain_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.contract.words import moment
from kc_otel.judge.decisions import INFERENCE_KERNEL, TRAIN_KERNEL, Canary, DecisionTable, Directive, DirectiveKind

if TYPE_CHECKING:
    from kc_otel.contract.model import Contract  # pydantic and YAML, which a service that routes does without

__all__ = ["Choice", "Router", "ServingKernel"]

_log: Final = logging.getLogger(__name__)
_ROUTE: Final = "route"  # kind of directive that a program reports to obey when it asks for routes
_HOST_CHARACTERS: Final = 80  # of the host's name, in the id of a router
_MOST_ASKED: Final = 64  # contracts and kinds of directives that are told; a process has a few
_MOST_KEPT: Final = 100  # slices and versions from which requests are kept that are told at a time
_MOST_VERSIONS: Final = 4096  # versions, by contract and slice, that are remembered; a process has a few
_MAPPINGS: Final = (dict, Mapping)  # dict first: the abstract class is slow to ask


class Router:
    """Routes of requests to kernels, and the evaluator's directives to this process.

        with Router("http://127.0.0.1:4320", contracts=[contract]) as router:
            kernel = router.choose("policy-7b", {"prompt_tokens": 9000}, inference_version="9f1c2ab04d77")

    Make it after forking worker processes: threads do not survive a fork. Close it when the process no longer
    serves: the evaluator reports no incident as contained while a router that it knows is silent and has not been
    closed. A process that exits normally closes its router.

    Args:
        url: Base URL of the evaluator's API.
        contracts: Contracts whose slices requests are matched against; not needed by callers that name slices.
        refresh: Least time between two requests to the evaluator, seconds.
        wait: How long the evaluator may hold an answer back until something changes, seconds; at most half of
            `stale_after`, so that an answer is never late because nothing changes.
        stale_after: Seconds without an answer after which only versions that were promoted to full serve.
        trusted: Short fingerprints that count as promoted to full although nobody promoted them here, such as the
            version that has served until today.
        keep: File that stores each new table, for a process that starts while the evaluator is gone: it starts with the
            pins, routes and promotions of the last table, without its directives, and stale. True for one named after
            the URL, in `kc-otel/` of XDG_STATE_HOME, or of ~/.local/state; False starts without any.
        token_file: File with the token that the evaluator requires; it is read for every request, so it may change.
            None for the file in KC_OTEL_TOKEN_FILE, or the token in KC_OTEL_TOKEN.

    Raises:
        ValueError: If the URL is not valid, or a file that `keep` names holds something else.
        OSError: If a file that `keep` names exists and cannot be read.
    """

    def __init__(
        self,
        url: str,
        *,
        contracts: Iterable[Contract] = (),
        refresh: float = 1.0,
        wait: float = 25.0,
        stale_after: float = 300.0,
        trusted: Iterable[str] = (),
        keep: str | os.PathLike[str] | bool = True,
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._setup(contracts, stale_after, trusted, time.monotonic)
        self._table_file = _default_file(url, token_file) if keep is True else TableFile(Path(keep)) if keep else None
        self._poller: Poller | None = Poller(
            url, self._arrived, self._heard, self._report, self._has_news,
            wait=min(wait, stale_after / 2), refresh=refresh, token_file=token_file,
        )  # fmt: skip
        if self._table_file is not None and (last := self._table_file.load()) is not None:
            self._take(replace(last, directives=()))  # of a run that has ended, perhaps
            self._received = last.version
        self._poller.start()
        atexit.register(self._close_at_exit, os.getpid())

    @classmethod
    def from_table(
        cls,
        table: DecisionTable,
        *,
        contracts: Iterable[Contract] = (),
        stale_after: float = NEVER,
        trusted: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> Router:
        """A router over a fixed table, without a thread or an evaluator: for tests and for batch jobs."""
        router = cls.__new__(cls)
        router._setup(contracts, stale_after, trusted, clock)  # noqa: SLF001 - its own
        router._poller = None  # noqa: SLF001 - its own
        router._take(table)  # noqa: SLF001 - its own
        router._touch()  # noqa: SLF001 - its own
        return router

    def _setup(
        self, contracts: Iterable[Contract], stale_after: float, trusted: Iterable[str], clock: Callable[[], float]
    ) -> None:
        self._contracts = {contract.name: contract for contract in contracts}
        self._asked = {(name, _ROUTE) for name in self._contracts}
        """Contracts, and kinds of directives that this process looks at; before its first request it may serve, too."""
        self._reported = self._answered = frozenset[tuple[str, str]]()
        """Those that the last request named, and those that the last answer was about."""
        self._unserved: frozenset[str] = frozenset()  # contracts that the evaluator says it does not judge
        self._instance = f"{socket.gethostname()[:_HOST_CHARACTERS]}/{os.getpid()}/{secrets.token_hex(3)}"
        self._served: set[tuple[str, str]] = set()  # contracts and versions that a request was sent to
        self._clock = clock
        self._stale_after = stale_after
        self._trusted = frozenset(trusted)
        self._fresh_until = -NEVER
        self._said_stale = False
        self._received = 0  # version of the evaluator's last table
        self._limits_left: tuple[Canary, ...] = ()
        """Limits of an evaluator that has lost its state: in force until it says anything of their versions."""
        self._snapshot = Snapshot(DecisionTable())

    @property
    def table(self) -> DecisionTable:
        """The table in force; version 0 and empty until the first one has arrived."""
        return self._snapshot.table

    @property
    def stale(self) -> bool:
        """True if the evaluator has been silent for longer than `stale_after`, or has never answered."""
        return self._clock() > self._fresh_until

    def choose(
        self,
        contract: str,
        where: Mapping[str, Scalar] | Iterable[str],
        inference_version: str | None = None,
        *,
        key: str | bytes | None = None,
    ) -> ServingKernel:
        """Choose the kernel that serves a request.

        Args:
            contract: metadata.name.
            where: Attributes of the request, matched against the contract's slices; or the names of its slices, where
                `all` need not be named.
            inference_version: Short fingerprint of the inference kernel that would serve it. Without it, every route
                and every canary applies, whatever version it is about.
            key: Key that decides whether the request is in a canary's share, such as the id of a user or conversation
                that must not change kernels midway. The same key gets the same kernel in every process, and moves
                at most once while a share grows. Without a key, the choice is random.

        Returns:
            `train-kernel` if a person has pinned one of the request's slices to it (the newest pin decides); if no pin
            covers them and a route does; if the request lies outside of the share of a canary that covers one; or if
            no pin covers them, the version is not known to have been promoted to full, and the table is stale or the
            evaluator does not judge this contract, or has not answered yet whether it does. Else `inference-kernel`.

        Raises:
            LookupError: If attributes are given for a contract that the router was not given.
        """
        return self.decide(contract, where, inference_version, key=key).kernel

    def decide(
        self,
        contract: str,
        where: Mapping[str, Scalar] | Iterable[str],
        inference_version: str | None = None,
        *,
        key: str | bytes | None = None,
    ) -> Choice:
        """Choose the kernel that serves a request, with the cause; arguments and errors are those of `choose`."""
        snapshot = self._snapshot
        if (contract, _ROUTE) not in self._asked:
            self._tell(contract, _ROUTE)
        if isinstance(where, _MAPPINGS):
            if contract not in self._contracts:
                raise LookupError(f"no contract {contract!r} to match attributes against; pass Router(contracts=[...])")
        else:
            where = frozenset((where,) if isinstance(where, str) else where)
        choice = snapshot.choice(contract, where, inference_version, key)
        stale = self._clock() > self._fresh_until
        unknown = self._poller is not None and (contract, _ROUTE) not in self._answered
        if choice.cause in {"default", "canary"} and (stale or unknown or contract in self._unserved):
            if choice.kernel == TRAIN_KERNEL:
                return choice
            if stale and not self._said_stale:
                self._say_stale()
            promoted = inference_version in self._trusted or (contract, inference_version) in snapshot.promoted
            choice = PROVEN if promoted else UNPROVEN
        if choice.slice:
            if len(snapshot.kept) < _MOST_VERSIONS:
                snapshot.kept.add((contract, choice.slice, inference_version or ""))
        elif choice.kernel == INFERENCE_KERNEL and len(self._served) < _MOST_VERSIONS:
            self._served.add((contract, inference_version or ""))
        return choice

    def choose_version(
        self,
        contract: str,
        where: Mapping[str, Scalar] | Iterable[str],
        versions: Iterable[str],
        *,
        key: str | bytes | None = None,
    ) -> str | None:
        """Choose one of several versions of the inference kernel for a request.

        Args:
            contract: As in `choose`.
            where: As in `choose`.
            versions: Short fingerprints, the preferred one first: a version in its canary before the one that it is
                to replace. A version whose promotion has not started yields to the later ones.
            key: As in `choose`.

        Returns:
            The first version that may serve it; None for the training kernel.
        """
        if not isinstance(where, _MAPPINGS):
            where = frozenset((where,) if isinstance(where, str) else where)
        candidates = [versions] if isinstance(versions, str) else list(versions)
        for version in candidates:
            started = version == candidates[-1] or self._has_started(contract, version)
            if started and self.decide(contract, where, version, key=key).kernel == INFERENCE_KERNEL:
                return version
        return None

    def _has_started(self, contract: str, version: str) -> bool:
        """Return whether a version has begun its promotion, has ended it in full, or is trusted."""
        snapshot = self._snapshot
        tried = any(share.version == version for share in snapshot.canaries.get(contract, ()))
        return tried or version in self._trusted or (contract, version) in snapshot.promoted

    def sampling(self, contract: str, default: float, inference_version: str | None = None) -> float:
        """Share of comparisons to measure: 1 while a `sample-more` step fires, else the default.

        Here as below, `inference_version` is the short fingerprint of the inference kernel in use: what is asked
        because of another one is ignored. Without it, all that is asked applies.
        """
        return 1.0 if self._directives(contract, DirectiveKind.SAMPLING, inference_version) else default

    def halted(self, contract: str, inference_version: str | None = None) -> str | None:
        """Return the reason to stop training while a `halt` is in force, and how that is lifted; else None."""
        found = self._directives(contract, DirectiveKind.HALT, inference_version)
        if not found:
            return None
        of, since = found[0].version or "the inference kernel", moment(found[0].since)
        lift = f"once it is mended or stopped, `kc-otel alerts ack {contract} --close --why ...` lifts the halt"
        return f"{found[0].reason}, of {of} since {since}; {lift}"

    def held(self, contract: str, inference_version: str | None = None) -> str | None:
        """Return the reason to hold promotion while a `hold-promotion` step fires; else None."""
        return self._first(contract, DirectiveKind.HOLD_PROMOTION, inference_version)

    def resync(self, contract: str, inference_version: str | None = None) -> str | None:
        """Return the reason to resync the inference kernel's weights while a `resync-weights` step fires; else None."""
        return self._first(contract, DirectiveKind.RESYNC_WEIGHTS, inference_version)

    def to_locate(self, contract: str, inference_version: str | None = None) -> Mapping[str, str]:
        """Slices whose drift should be located, each with the reason, while a `locate` step fires."""
        return _by_slice(self._directives(contract, DirectiveKind.LOCATE, inference_version))

    def quarantined(self, contract: str, inference_version: str | None = None) -> Mapping[str, str]:
        """Slices whose rollouts should not be trained on, each with the reason; empty when there are none."""
        return _by_slice(self._directives(contract, DirectiveKind.QUARANTINE_ROLLOUTS, inference_version))

    def wait_for_table(self, timeout: float) -> bool:
        """Wait at start-up until the evaluator has answered; return True if it has."""
        deadline = time.monotonic() + timeout
        while self._fresh_until == -NEVER and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._fresh_until != -NEVER

    def close(self) -> None:
        """Stop polling, and tell the evaluator that this process no longer serves. The last table stays in force."""
        if self._poller is not None:
            self._poller.stop()
            self._poller.join(timeout=2.0)
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self, process: int) -> None:
        """Close it in the process that made it: a fork has no thread of it, and must not end its connection."""
        if os.getpid() == process:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _first(self, contract: str, kind: DirectiveKind, version: str | None) -> str | None:
        return next((asked.reason for asked in self._directives(contract, kind, version)), None)

    def _directives(self, contract: str, kind: DirectiveKind, version: str | None) -> Sequence[Directive]:
        """Directives about a version; that the program asks at all is told to the evaluator with the next request."""
        if (contract, kind) not in self._asked:
            self._tell(contract, kind)
        return [asked for asked in self._snapshot.directives.get((contract, kind), ()) if asked.is_about(version)]

    def _tell(self, contract: str, kind: str) -> None:
        if len(self._asked) < _MOST_ASKED:
            self._asked = {*self._asked, (contract, kind)}  # the poller reads it on another thread

    def _report(self) -> list[tuple[str, str]]:
        """Return what the evaluator is told, as names and values of its query.

        Its id; the directives that this process looks at; for routes, how it defines the slices that the table names;
        and from which slices and versions it keeps requests, of versions that it sent requests to before.
        """
        named = {(route.contract, route.slice) for route in self.table.routes}
        named |= {(pin.contract, pin.slice) for pin in self.table.pins}
        defined: dict[str, str] = {}
        for name, contract in self._contracts.items():
            defined[name] = "".join(id for slice, id in contract.slice_ids.items() if (name, slice) in named)
        told = [("instance", self._instance)]
        self._reported = frozenset(self._asked)
        for name, kind in sorted(self._reported):
            ids = defined.get(name, "") if kind == _ROUTE else ""
            told.append(("obeys", f"{name}/{kind}/{ids}" if ids else f"{name}/{kind}"))
        kept = self._kept()
        # A few at a time, in turn by chance: a request has a longest length.
        sample = random.sample(kept, min(len(kept), _MOST_KEPT))
        self._snapshot.told.update(sample)
        return told + [("kept", "/".join(entry)) for entry in sample]

    def _kept(self) -> list[tuple[str, str, str]]:
        """Contracts, slices and versions of requests that are kept from a version that had served."""
        kept = tuple(self._snapshot.kept)
        return [(contract, slice, version) for contract, slice, version in kept if (contract, version) in self._served]

    def _has_news(self) -> bool:
        """Return whether the evaluator has not been told of a contract, or that requests are kept from a version."""
        told = self._snapshot.told
        new = any(kind == _ROUTE for _, kind in self._asked - self._reported)
        return new or not all(entry in told for entry in self._kept())

    def _heard(self, unserved: Collection[str]) -> None:
        self._unserved, self._answered = frozenset(unserved), self._reported
        self._touch()

    def _touch(self) -> None:
        self._fresh_until = self._clock() + self._stale_after
        self._said_stale = False

    def _say_stale(self) -> None:
        """Log once per outage which kernels serve while the evaluator does not answer."""
        self._said_stale = True
        serve = sorted({*self._trusted, *(version for _, version in self._snapshot.promoted)})
        why = "no decision table yet" if self._fresh_until == -NEVER else f"no answer for {self._stale_after:g} s"
        _log.warning(
            "%s: requests that no pin and no route covers go to versions that were promoted to full or are trusted "
            "(%s), else to the training kernel, until the evaluator answers",
            why,
            ", ".join(serve) or "none is known; Router(trusted=[...]) names those that serve already",
        )

    def _arrived(self, table: DecisionTable, fresh: bool = True) -> None:
        before = self._snapshot.table
        known = self._limits_left
        left = _unnamed(known if table.version >= self._received else before.canaries, table)
        if left and not known:
            _log.warning(
                "the evaluator's decisions began anew: versions that it had limited, and does not name, stay limited"
            )
        self._received, self._limits_left = table.version, left
        if left:
            version = max(table.version, before.version)
            table = replace(table, version=version, canaries=(*table.canaries, *left))
        self._take(table)
        if fresh:
            self._touch()  # before the file is written: a slow disk does not make it stale
        if self._table_file is not None:
            self._table_file.save(table)

    def _take(self, table: DecisionTable) -> None:
        self._snapshot = compiled(table, self._contracts)


def _by_slice(directives: Sequence[Directive]) -> dict[str, str]:
    """Reasons by slice, of the first directive about each."""
    return {asked.slice: asked.reason for asked in reversed(directives)}


def _unnamed(limits: Iterable[Canary], table: DecisionTable) -> tuple[Canary, ...]:
    """Limits of versions that a table of an evaluator which has lost its state says nothing of.

    A version that was rolled back, or whose share was small, must not serve because of that.
    """
    said = {(canary.contract, canary.version) for canary in table.canaries}
    said |= {(promoted.contract, promoted.version) for promoted in table.promoted}
    return tuple(canary for canary in limits if (canary.contract, canary.version) not in said)


class TableFile:
    """A file with one table. Processes may share it: each write replaces it in one step.

    `own` is the default file: its folder is created, and an unreadable file is logged and replaced.
    """

    def __init__(self, path: Path, *, own: bool = False) -> None:
        self._path, self._own = path, own
        self._failed = False

    def load(self) -> DecisionTable | None:
        """The table, or None where there is no file yet; ValueError if it holds something else, or OSError."""
        try:
            return DecisionTable.from_plain(read_json_text(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            said = f"{self._path}: not a decision table ({error!r}); remove it, or keep another"
            if self._own:
                _log.warning("no decision table from the process before: %s", said)
                return None
            raise error if isinstance(error, OSError) else ValueError(said) from None

    def save(self, table: DecisionTable) -> None:
        """Replace the file; a failure is logged once, because requests are routed anyway."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            if self._own:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(table.to_json())
            beside.replace(self._path)
        except OSError as error:
            if not self._failed:
                _log.warning("the decision table cannot be kept in %s: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False


def _default_file(url: str, token_file: str | os.PathLike[str] | None) -> TableFile | None:
    """Return the file of this evaluator and token; None for a user without a home."""
    asked = f"{url}\0{'' if token_file is None else os.fspath(token_file)}"
    name = f"decisions-{hashlib.blake2b(asked.encode(), digest_size=6).hexdigest()}.json"
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        return None
    return TableFile(state / "kc-otel" / name, own=True)
