"""The router: asks the decision table in the serving process, on every request, without network and without locks.

A daemon thread keeps the table fresh and swaps one reference to an immutable snapshot; readers take that reference and
never wait. When the evaluator is gone the last table stays in force: a route is lifted by a person, never by an outage.
Once it has been gone for longer than `stale_after`, `on_stale` decides for everything that no pin or route covers. With
`keep` the last table is in a file too, for a serving process that starts while the evaluator is gone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self

from kc_otel.client.poll import Poller
from kc_otel.client.snapshot import NEVER, STALE, Choice, Kernel, Snapshot, compiled
from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.judge.decisions.table import INFERENCE_KERNEL, TRAIN_KERNEL, DecisionTable, DirectiveKind
from kc_otel.judge.plain_json import to_json

__all__ = ["Choice", "Kernel", "Router", "TableFile"]

_log: Final = logging.getLogger(__name__)
_MOST_ASKED: Final = 64
"""Contracts and kinds of directives that are told; a process has a few."""
_NO_DIRECTIVES: Final[Mapping[str, str]] = MappingProxyType({})
_MAPPINGS: Final = (dict, Mapping)
"""dict first: the abstract class is slow to ask."""


class Router:
    """Which kernel serves a request, and what the evaluator asks of this process.

        with Router("http://127.0.0.1:4320", contracts=[contract]) as router:
            kernel = router.choose("policy-7b", {"prompt_tokens": 9000}, inference_version="9f1c2ab04d77")

    Make it after forking worker processes: threads do not survive a fork.

    Args:
        url: Base URL of the evaluator's API.
        contracts: Contracts whose slices requests are matched against; not needed by callers that name slices.
        refresh: Least time between two requests to the evaluator, seconds.
        wait: How long the evaluator may hold an answer back until something changes, seconds.
        stale_after: Seconds without an answer after which `on_stale` applies.
        on_stale: Kernel for requests that no pin and no route covers while the table is stale. `inference-kernel` goes
            on as before, canaries included; `train-kernel` serves nothing that nobody watches.
        keep: File that takes each new table, for a process that starts while the evaluator is gone: it starts with the
            pins and routes of the last table, which counts as stale. None starts without any.
        token_file: File that holds the token which the evaluator asks for; it is read with every request, so that it
            may change. None for what KC_OTEL_TOKEN_FILE names, or KC_OTEL_TOKEN itself.

    Raises:
        ValueError: If the URL is not one, `on_stale` is not a kernel, or the file of `keep` holds something else.
        OSError: If the file of `keep` exists and cannot be read.
    """

    def __init__(
        self,
        url: str,
        *,
        contracts: Iterable[Contract] = (),
        refresh: float = 1.0,
        wait: float = 25.0,
        stale_after: float = 300.0,
        on_stale: Kernel = INFERENCE_KERNEL,
        keep: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._setup(contracts, stale_after, on_stale, time.monotonic)
        self._table_file = None if keep is None else TableFile(Path(keep))
        self._poller: Poller | None = Poller(
            url,
            self._arrived,
            self._touch,
            lambda: sorted(self._asked),
            wait=wait,
            refresh=refresh,
            token_file=token_file,
        )
        if self._table_file is not None and (last := self._table_file.load()) is not None:
            self._take(last)
        self._poller.start()

    @classmethod
    def from_table(
        cls,
        table: DecisionTable,
        *,
        contracts: Iterable[Contract] = (),
        stale_after: float = NEVER,
        on_stale: Kernel = INFERENCE_KERNEL,
        clock: Callable[[], float] = time.monotonic,
    ) -> Router:
        """A router over a fixed table, without a thread or an evaluator: for tests and for batch jobs."""
        router = cls.__new__(cls)
        router._setup(contracts, stale_after, on_stale, clock)  # noqa: SLF001 - its own
        router._poller = None  # noqa: SLF001 - its own
        router._take(table)  # noqa: SLF001 - its own
        router._touch()  # noqa: SLF001 - its own
        return router

    def _setup(
        self, contracts: Iterable[Contract], stale_after: float, on_stale: Kernel, clock: Callable[[], float]
    ) -> None:
        if on_stale not in {TRAIN_KERNEL, INFERENCE_KERNEL}:
            raise ValueError(f"on_stale={on_stale!r} is not a kernel; write {TRAIN_KERNEL!r} or {INFERENCE_KERNEL!r}")
        self._contracts = {contract.name: contract for contract in contracts}
        self._asked: set[tuple[str, DirectiveKind]] = set()
        self._clock = clock
        self._stale_after = stale_after
        self._on_stale: Kernel = on_stale
        self._fresh_until = -NEVER
        self._snapshot = Snapshot(DecisionTable())

    @property
    def table(self) -> DecisionTable:
        """The table in force; version 0 and empty until the first one has arrived."""
        return self._snapshot.table

    @property
    def stale(self) -> bool:
        """Whether the evaluator has been silent for longer than `stale_after`, or has never answered."""
        return self._clock() > self._fresh_until

    def choose(
        self,
        contract: str,
        where: Mapping[str, Scalar] | Iterable[str],
        inference_version: str | None = None,
        *,
        key: str | bytes | None = None,
    ) -> Kernel:
        """Which kernel serves a request.

        Args:
            contract: metadata.name.
            where: Attributes of the request, matched against the contract's slices; or the names of its slices, where
                `all` need not be named.
            inference_version: Short fingerprint of the inference kernel that would serve it. Without it every version
                counts as avoided that has a route, also one that was rolled out since, and every canary limits it.
            key: What decides whether the request is in a canary's share, such as the id of the user or conversation
                that must not change kernels on the way. The same key gets the same kernel, in every process, and moves
                once at most while a weight grows. Without one chance decides.

        Returns:
            What a person has pinned for one of the request's slices, the newest pin first. Else `train-kernel` if a
            route covers one of them, if it lies outside of the share of a canary that does, or if the table is stale
            and `on_stale` says so; else `inference-kernel`.

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
        """Which kernel serves a request, and what decided it; arguments and errors are those of `choose`."""
        snapshot = self._snapshot
        if isinstance(where, _MAPPINGS):
            if contract not in self._contracts:
                raise LookupError(f"no contract {contract!r} to match attributes against; pass Router(contracts=[...])")
        else:
            where = frozenset((where,) if isinstance(where, str) else where)
        choice = snapshot.choice(contract, where, inference_version, key)
        if choice.cause in {"default", "canary"} and self._clock() > self._fresh_until:
            return choice if choice.kernel == TRAIN_KERNEL else STALE[self._on_stale]
        return choice

    def choose_version(
        self,
        contract: str,
        where: Mapping[str, Scalar] | Iterable[str],
        versions: Iterable[str],
        *,
        key: str | bytes | None = None,
    ) -> str | None:
        """Which of several versions of the inference kernel serves a request.

        Args:
            contract: As in `choose`.
            where: As in `choose`.
            versions: Short fingerprints, the preferred one first: a version in its canary before the one that it is
                to replace.
            key: As in `choose`.

        Returns:
            The first version that may serve it; None for the training kernel.
        """
        if not isinstance(where, _MAPPINGS):
            where = frozenset((where,) if isinstance(where, str) else where)
        for version in versions:
            if self.decide(contract, where, version, key=key).kernel == INFERENCE_KERNEL:
                return version
        return None

    def sampling(self, contract: str, default: float) -> float:
        """Share of comparisons to measure: 1 while a `sample-more` step fires, else the default."""
        return 1.0 if self._directives(contract, DirectiveKind.SAMPLING) else default

    def halted(self, contract: str) -> str | None:
        """Why training should stop, while a `halt` step fires; else None."""
        return self._first(contract, DirectiveKind.HALT)

    def held(self, contract: str) -> str | None:
        """Why promotion should wait, while a `hold-promotion` step fires; else None."""
        return self._first(contract, DirectiveKind.HOLD_PROMOTION)

    def resync(self, contract: str) -> str | None:
        """Why the inference kernel should get the trainer's weights, while a `resync-weights` step fires; else None."""
        return self._first(contract, DirectiveKind.RESYNC_WEIGHTS)

    def to_locate(self, contract: str) -> Mapping[str, str]:
        """Slices whose drift should be located, each with the reason, while a `locate` step fires."""
        return self._directives(contract, DirectiveKind.LOCATE)

    def quarantined(self, contract: str) -> Mapping[str, str]:
        """Slices whose rollouts should not be trained on, each with the reason; empty when there are none."""
        return self._directives(contract, DirectiveKind.QUARANTINE_ROLLOUTS)

    def wait_for_table(self, timeout: float) -> bool:
        """Wait until the evaluator has answered; for start-up. Returns whether it has."""
        deadline = time.monotonic() + timeout
        while self._fresh_until == -NEVER and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._fresh_until != -NEVER

    def close(self) -> None:
        """Stop polling. The last table stays in force."""
        if self._poller is not None:
            self._poller.stop()
            self._poller.join(timeout=2.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _first(self, contract: str, kind: DirectiveKind) -> str | None:
        return next(iter(self._directives(contract, kind).values()), None)

    def _directives(self, contract: str, kind: DirectiveKind) -> Mapping[str, str]:
        """Slices and reasons; that the program asks at all is told to the evaluator with the next request."""
        key = (contract, kind)
        if key not in self._asked and len(self._asked) < _MOST_ASKED:
            self._asked = {*self._asked, key}  # the poller reads it on another thread
        return self._snapshot.directives.get(key, _NO_DIRECTIVES)

    def _touch(self) -> None:
        self._fresh_until = self._clock() + self._stale_after

    def _arrived(self, table: DecisionTable) -> None:
        self._take(table)
        self._touch()  # before the file is written: a slow disk does not make it stale
        if self._table_file is not None:
            self._table_file.save(table)

    def _take(self, table: DecisionTable) -> None:
        self._snapshot = compiled(table, self._contracts)


class TableFile:
    """A file with one table. Processes may share it: each write replaces it in one step.

    Args:
        path: The file; its folder has to exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def load(self) -> DecisionTable | None:
        """The table, or None where there is no file yet.

        Raises:
            ValueError: If it holds something else.
            OSError: If it cannot be read.
        """
        try:
            return DecisionTable.from_plain(read_json_text(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self._path}: not a decision table ({error!r}); remove it, or keep another") from None

    def save(self, table: DecisionTable) -> None:
        """Replace the file; what goes wrong is logged once, because requests are routed all the same."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            beside.write_text(to_json(table))
            beside.replace(self._path)
        except OSError as error:
            if not self._failed:
                _log.warning("the decision table cannot be kept in %s: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False
