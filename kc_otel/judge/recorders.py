"""Kernels and recorders that report themselves: names of kernels, and when a recorder of which version was heard last.

A recorder says with each export which kernel version is in use, and before it shuts down that it is done with it. One
that stops without a word may have died beside a kernel that serves: what it measured is not known to be over because
other recorders of the version measure something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kc_otel.contract.model import KernelSpecs, declared_apart, declared_otherwise
from kc_otel.contract.slices import Scalar
from kc_otel.contract.units import format_duration
from kc_otel.judge.plain_json import not_later
from kc_otel.judge.points import INVALID
from kc_otel.judge.series import Pair, SeriesKey

_PREFIX: Final = "kc.kernel."
_MAX_KERNELS: Final = 256
_MAX_FIELDS: Final = 32
_MAX_CHARACTERS: Final = 200
_NAMING_FIELDS: Final = ("engine", "engine.version", "dtype", "quantization")
ONE_KERNEL: Final = "two kernels are declared, but both sides report the same one"
_IDENTITY_ATTRIBUTES: Final = frozenset({"kc.contract", "kc.kernel.role", "kc.kernel.version"})


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A kernel version in a role, `train` or `inference`, and the fields that its fingerprint is made of."""

    role: str
    version: str
    fields: dict[str, str]
    last_seen: float


def see_kernel(known: dict[tuple[str, str], KernelInfo], attributes: Mapping[str, Scalar], now: float) -> bool:
    """Take the attributes of a kc.kernel.info point; return whether they name a kernel."""
    role, version = attributes.get("kc.kernel.role"), attributes.get("kc.kernel.version")
    if not (isinstance(role, str) and isinstance(version, str) and role and version):
        return False
    given = [(name, value) for name, value in attributes.items() if name not in _IDENTITY_ATTRIBUTES][:_MAX_FIELDS]
    fields = {name.removeprefix(_PREFIX)[:_MAX_CHARACTERS]: str(value)[:_MAX_CHARACTERS] for name, value in given}
    know_kernel(known, KernelInfo(role[:_MAX_CHARACTERS], version[:_MAX_CHARACTERS], fields, now))
    return True


def know_kernel(known: dict[tuple[str, str], KernelInfo], info: KernelInfo) -> None:
    """Keep a version, and as many others as there is room for."""
    known[info.role, info.version] = info
    if len(known) > _MAX_KERNELS:
        del known[min(known, key=lambda name: known[name].last_seen)]


def kernel_name(fields: Mapping[str, str], version: str, others: Iterable[Mapping[str, str]] = ()) -> str:
    """A kernel as people call it, its fingerprint after it, and what tells it from `others` that are called alike.

    >>> cache = {"engine": "vllm", "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    >>> kernel_name(cache, "6cc3fbbbec48", [cache | {"kv_cache_dtype": "auto"}])
    'vllm bfloat16, kv_cache_dtype fp8 (6cc3fbbbec48)'
    """
    own = [fields.get(name) for name in _NAMING_FIELDS]
    said = " ".join(filter(None, own))
    if not said:
        return version
    alike = [other for other in others if [other.get(name) for name in _NAMING_FIELDS] == own]
    names = sorted({name for kernel in alike for name in {*kernel, *fields} if kernel.get(name) != fields.get(name)})
    parts = [said, *(f"{name} {fields.get(name, 'not reported')}" for name in names)]
    return f"{', '.join(parts)} ({version})"


def kernel_names(kernels: Iterable[KernelInfo]) -> dict[tuple[str, str], str]:
    """The names of a contract's kernels, by role and version."""
    known = list(kernels)
    return {
        (kernel.role, kernel.version): kernel_name(
            kernel.fields, kernel.version, [other.fields for other in known if other.version != kernel.version]
        )
        for kernel in known
    }


def pair_name(names: Mapping[tuple[str, str], str], train: str, inference: str) -> str:
    """The two kernels of a pair, by their `kernel_names`, as the end of a sentence; empty where none has reported.

    >>> pair_name({("inference", "6cc3fbbbec48"): "vllm fp8 (6cc3fbbbec48)"}, "9cb1f0c2a7d4", "6cc3fbbbec48")
    ' for vllm fp8 (6cc3fbbbec48) against 9cb1f0c2a7d4'
    """
    ours, theirs = names.get(("inference", inference), inference), names.get(("train", train), train)
    return (f" for {ours}" if ours else "") + (f" against {theirs}" if theirs else "")


def unlike_declared(specs: KernelSpecs, kernel: KernelInfo, known: Iterable[KernelInfo]) -> tuple[str, ...]:
    """List how a kernel differs from its declaration: by a field, or by being the other side's kernel."""
    found = declared_otherwise(specs.train if kernel.role == "train" else specs.inference, kernel.fields)
    twice = {other.role for other in known if other.version == kernel.version} >= {"train", "inference"}
    return (*found, ONE_KERNEL) if twice and declared_apart(specs) else found


def stand_in(known: Iterable[KernelInfo]) -> frozenset[str]:
    """Versions that train, and serve beside others: slices are routed to the training kernel, and measured there."""
    of_role = {role: {kernel.version for kernel in known if kernel.role == role} for role in ("train", "inference")}
    both = of_role["train"] & of_role["inference"]
    return frozenset(both if of_role["inference"] > both else ())


_MAX_VERSIONS: Final = 256
"""Kernel versions whose recorders are remembered: those that were reported last."""
_MAX_RECORDERS: Final = 4096
"""Recorders that are told apart, of all versions together: those that were heard last."""
_MORE_RECORDERS: Final = "\0"
"""Stands for those of a version that are forgotten, of which nobody knows whether they ended."""
_ANOTHER_VERSION: Final = ""
"""The version to which a recorder moved, where it is not said which."""
_SHUT_DOWN: Final = "\0\0"
"""Stands for those that have shut down."""
_HEARTBEATS: Final = 2.0
"""Heartbeats without a report after which a recorder is silent: one export of it may be late or lost."""

_NOT_YET: Final = 0.0
_AT_ONCE: Final = 1.0
_ENDED: Final = 2.0
"""Times long before any window, of recorders that have not measured again, have without a pause, and have shut down."""
_MAX_NAMED: Final = 3
"""Recorders that a sentence names."""


class LastReport(NamedTuple):
    """The last report of a recorder."""

    at: float
    version: int = 0
    """metadata.version of the contract that it applies; 0 where it does not say."""
    otherwise: tuple[str, ...] = ()
    """Slices of the evaluator's contract that this one lacks, or defines in another way."""
    unmeasured: tuple[str, ...] = ()
    """Clauses of the evaluator's contract for which this one measures something else, or nothing."""
    measured: float = 0.0
    """When it last reported new observations; 0 for never."""
    moved: float = 0.0
    """When it went over to another kernel version; 0 for one that has not, or has shut down."""


class Recorders:
    """Recorders that reported a kernel version and did not say that they are done with it; times are Unix seconds.

    Each exports within a `heartbeat`. `by_version` has the last reports by version and sender, `gone` those of
    recorders that are done with the version. `measured` has, by sender, when it last observed each series; those of
    `INVALID` are by slice. `owed` has, of each series that is or was broken, the senders that measured it then, and
    when they measured it again, or _NOT_YET, _AT_ONCE, _ENDED. `unsaved` has the senders whose entry in `measured` has
    changed.
    """

    def __init__(self, heartbeat: float, window: float) -> None:
        self.by_version: dict[str, dict[str, LastReport]] = {}
        self.gone: dict[str, dict[str, LastReport]] = {}
        self.measured: dict[str, dict[SeriesKey, float]] = {}
        self.owed: dict[SeriesKey, dict[str, float]] = {}
        self.unsaved: set[str] = set()
        self._merges = False  # another process has what is measured of series
        self._patience = _HEARTBEATS * heartbeat
        self._window = window

    def hear(self, version: str, sender: str, report: LastReport, *, done: bool) -> bool:
        """Note that a recorder reports a kernel version, or is done with it: it shuts down, or records another.

        Returns True for the first report of a recorder, or the first since it was done.
        """
        senders = self.by_version.pop(version, {})
        self.by_version[version] = senders  # the newest is at the end
        while len(self.by_version) > _MAX_VERSIONS:
            oldest = next(iter(self.by_version))
            self.gone.pop(oldest, None)
            for name in self.by_version.pop(oldest):
                self._drop_measured(name)
        before = senders.pop(sender, None)  # the newest is at the end
        if done:
            self._note_gone(version, sender, report)
            return False
        self.gone.get(version, {}).pop(sender, None)
        if before is None and sum(map(len, self.by_version.values())) >= _MAX_RECORDERS:
            self._forget()
        senders[sender] = report if before is None else report._replace(measured=max(report.measured, before.measured))
        return before is None

    def _note_gone(self, version: str, sender: str, report: LastReport) -> None:
        """Note that a recorder is done with a version; of others that only shut down, and not lately, forget it."""
        gone = {
            name: other
            for name, other in self.gone.get(version, {}).items()
            if other.moved or self._is_recent(other, report.at)
        }
        self.gone[version] = gone
        full = sum(map(len, self.gone.values())) >= _MAX_RECORDERS
        name = _MORE_RECORDERS if full and sender not in gone else sender
        gone[name] = report._replace(moved=gone[name].moved if name in gone else report.moved)

    def _ended(self, version: str) -> float:
        """When a recorder last said that it is done with a version; -inf for never."""
        return max((report.at for report in self.gone.get(version, {}).values()), default=-math.inf)

    def _forget(self) -> None:
        """Tell the recorder heard longest ago, of the version heard longest ago, no longer apart."""
        for version, senders in self.by_version.items():
            if (sender := next((name for name in senders if name != _MORE_RECORDERS), None)) is not None:
                senders[_MORE_RECORDERS] = senders.pop(sender)
                self._drop_measured(sender)
                for key, owing in self.owed.items():
                    if key.kernel_inference == version and owing.pop(sender, None) is not None:
                        owing[_MORE_RECORDERS] = _NOT_YET
                return

    def _drop_measured(self, sender: str) -> None:
        """Forget what a recorder measured, unless it reports another version."""
        if not self.versions_of(sender):
            self._forget_measured(sender)

    def _forget_measured(self, sender: str) -> None:
        self.measured.pop(sender, None)
        self.unsaved.add(sender)

    def observe(self, sender: str, keys: Collection[SeriesKey], now: float) -> None:
        """Note that a recorder has observed something new of some series."""
        named = {key.kernel_inference for key in keys}
        here = {version for version in named if sender in self.by_version.get(version, {})}
        if here != named:
            keys = [key for key in keys if key.kernel_inference in here]
        if not keys:
            return
        seen = self.measured.setdefault(sender, {})
        for version in here:
            self.by_version[version][sender] = self.by_version[version][sender]._replace(measured=now)
        for key, owing in self.owed.items():
            if owing.get(sender) == _NOT_YET and (shown := [of for of in keys if _shows(key, of)]):
                paused = now - max(seen.get(of, 0.0) for of in shown) > self._patience
                owing[sender] = now if paused else _AT_ONCE
        seen.update(dict.fromkeys(keys, now))
        self.unsaved.add(sender)

    def owe(self, broken: Mapping[SeriesKey, float], kept: Collection[SeriesKey]) -> None:
        """Have each who measured a broken series, since a window before it broke, show that it is over.

        What is not among those `kept` is forgotten.
        """
        for key in self.owed.keys() - kept:
            del self.owed[key]
        for key, since in broken.items():
            owing = self.owed.setdefault(key, {})
            for sender in {*self.measured, *self.by_version.get(key.kernel_inference, {})}:
                if self._last(sender, key) >= since - self._window:
                    owing[sender] = _NOT_YET

    def _last(self, sender: str, key: SeriesKey) -> float:
        """Time at which a recorder last measured a series; of one that another process heard, whatever it measured."""
        if not self._merges or sender in self.measured:
            return self.measured.get(sender, {}).get(key, -math.inf)
        report = self.by_version.get(key.kernel_inference, {}).get(sender)
        return -math.inf if report is None else report.measured

    def unheard(self, key: SeriesKey, silence: Callable[[float], float], now: float) -> bool:
        """Return True if a recorder that measured a series while it was broken has not shown that it is over.

        One that reports and has observed nothing more shows nothing: it was drained, and may serve again. So may one
        that observes other slices, or another version. One that paused is heard once all of a window is from after it.
        """
        silent = self.silent(key.kernel_inference, silence)
        return any(
            at == _NOT_YET or now - at < self._window or sender in silent
            for sender, at in self.owed.get(key, {}).items()
        )

    def owed_apart(self, key: SeriesKey, others: Collection[SeriesKey]) -> bool:
        """Return True if a recorder that owes a series, and has not measured it again, owes none of some others."""
        owing = {sender for sender, at in self.owed.get(key, {}).items() if at == _NOT_YET}
        return not owing <= {sender for other in others for sender in self.owed.get(other, ())}

    def merge(self, version: str, sender: str, report: LastReport, *, done: bool) -> bool:
        """Note what another process has heard: one that begins tells all that it remembers, also what is over.

        Returns True as `hear` does.
        """
        self._merges, first = True, False
        known = self.by_version.get(version, {}).get(sender)
        if report.at > (self._ended(version) if known is None else known.at):
            first = self.hear(version, sender, report, done=done)
            self.move(sender, {version: done} | ({_ANOTHER_VERSION: False} if report.moved else {}), report.at)
            for key, owing in self.owed.items():
                if (
                    key.kernel_inference == version
                    and owing.get(sender) == _NOT_YET
                    and report.measured > (0.0 if known is None else known.measured)
                ):
                    owing[sender] = report.measured
        return first

    def all_ended(self, version: str, last: float, lasting: float) -> bool:
        """Return True if each recorder of a version is done with it, and it was not heard of after that.

        One that had been silent for `lasting` seconds by then counts no more, unless it has a breach to refute.
        """
        ended = self._ended(version)
        if not self.gone.get(version) or ended < last:
            return False
        owed = [owing for key, owing in self.owed.items() if key.kernel_inference == version]
        return not any(
            report.at > ended - lasting or any(owing.get(sender) == _NOT_YET for owing in owed)
            for sender, report in self.by_version.get(version, {}).items()
        )

    def move(self, sender: str, done: Mapping[str, bool], now: float) -> None:
        """Note all that a recorder says of versions in one message: where it is done with each, it shuts down."""
        shuts_down = all(done.values()) and not self.versions_of(sender)  # a collector may have split the message
        if not shuts_down:
            for gone in [self.gone.get(version, {}) for version, left in done.items() if left]:
                name = sender if sender in gone else _MORE_RECORDERS
                if name in gone:
                    gone[name] = gone[name]._replace(moved=gone[name].moved or now)
            return
        for gone in self.gone.values():
            if sender in gone:
                gone[sender] = gone[sender]._replace(moved=0.0)
        self._forget_measured(sender)
        for owing in self.owed.values():
            if owing.pop(sender, None) is not None:
                owing[_SHUT_DOWN] = _ENDED

    def moved_since(self, version: str, since: float = -math.inf) -> bool:
        """Return True if a recorder of a version measures another one, since a Unix time in seconds or later."""
        return any(report.moved and report.moved >= since for report in self.gone.get(version, {}).values())

    def shared(self) -> set[str]:
        """Kernel versions that several recorders report."""
        return {version for version, senders in self.by_version.items() if len(senders) > 1}

    def silent(self, version: str, silence: Callable[[float], float]) -> dict[str, float]:
        """Seconds of silence of each recorder of a version that fell silent without a word.

        `silence` returns the seconds of silence of who was heard last at a Unix time.
        """
        found = {sender: silence(report.at) for sender, report in self.by_version.get(version, {}).items()}
        return {sender: quiet for sender, quiet in found.items() if quiet > self._patience}

    def silent_members(self, version: str, silence: Callable[[float], float], lasting: float) -> tuple[int, str]:
        """Count the recorders of a version that fell silent without a word while others report, and name them.

        After `lasting` seconds of silence a recorder is counted no more. The sentence is empty for none.
        """
        silent = self.silent(version, silence)
        lately = sorted((quiet, sender) for sender, quiet in silent.items() if quiet <= lasting)
        all_of_it = len(self.by_version.get(version, ())) - len(silent) + len(lately)
        others_report = any(
            silence(report.at) <= self._patience for senders in self.by_version.values() for report in senders.values()
        )
        if not lately or not others_report:
            return 0, ""
        named = [
            f"{'others' if sender == _MORE_RECORDERS else sender} for {format_duration(round(quiet))}"
            for quiet, sender in lately[:_MAX_NAMED]
        ]
        named += [f"{len(lately) - _MAX_NAMED} more"] if len(lately) > _MAX_NAMED else []
        are = f"{len(lately)} of {all_of_it} recorders {'is' if len(lately) == 1 else 'are'}"
        return len(lately), f"{are} silent without having shut down: {', '.join(named)}"

    def all_who_broke_ended(self, pair: Pair, lasting: float) -> bool:
        """Return True if each recorder that measured a pair while something of it was broken has shut down since.

        The others of its version measure another pair: one that was started in their place may serve as they did. One
        that had been silent for `lasting` seconds by then counts no more, as in `all_ended`.
        """
        counted_from = self._ended(pair[1]) - lasting
        owed = [owing for key, owing in self.owed.items() if key.pair == pair]
        return (
            bool(owed)
            and all(owing and set(owing.values()) == {_ENDED} for owing in owed)
            and all(
                report.at <= counted_from
                or any(key.kernel_inference == pair[1] and key.pair != pair for key in self.measured.get(sender, ()))
                for sender, report in self.by_version.get(pair[1], {}).items()
            )
        )

    def lost(self, version: str, since: float, until: float, silence: Callable[[float], float]) -> bool:
        """Return True if a recorder that reported a version from `since` on is silent, or was at `until` and since."""
        return any(
            since - self._patience < report.at and (report.at <= until or silence(report.at) > self._patience)
            for report in self.by_version.get(version, {}).values()
        )

    def versions_of(self, sender: str) -> list[str]:
        """Return the kernel versions that a recorder reports, the newest last."""
        return [version for version, senders in self.by_version.items() if sender in senders]

    def otherwise(self, now: float) -> Iterator[tuple[str, LastReport]]:
        """Yield kernel versions and recorders that have other slices or clauses than this contract, if heard lately."""
        for (version, _), (report, _) in self.reports().items():
            if (report.otherwise or report.unmeasured) and self._is_recent(report, now):
                yield version, report

    def reports(self) -> dict[tuple[str, str], tuple[LastReport, bool]]:
        """The last report of each recorder of a version, by both, and whether it is done with that."""
        return {
            (version, sender): (report, done)
            for done, table in ((True, self.gone), (False, self.by_version))
            for version, senders in table.items()
            for sender, report in senders.items()
        }

    def _is_recent(self, report: LastReport, now: float) -> bool:
        return now - report.at <= max(self._patience, self._window)

    def turn_back(self, now: float) -> None:
        """The clock went back: none reported later than now."""
        known = self.by_version, self.gone, self.measured, self.owed
        self.by_version, self.gone, self.measured, self.owed = not_later(known, now)


def _shows(key: SeriesKey, other: SeriesKey) -> bool:
    """Return True if observations of a series show how another is: the same, or valid input where it was invalid."""
    return other == key or (key.metric == INVALID != other.metric and key[1:] == other[1:])
