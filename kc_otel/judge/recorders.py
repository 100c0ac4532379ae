"""Kernels and recorders that report themselves: names of kernels, and when a recorder of which version was heard last.

A recorder says with each export which kernel version is in use, and before it shuts down that it is done with it. One
that stops without a word may have died beside a kernel that serves: what it measured is not known to be over because
other recorders of the version measure something else.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kc_otel.contract.declared_kernels import declared_apart, declared_otherwise
from kc_otel.contract.model import KernelSpecs
from kc_otel.contract.slices import Scalar
from kc_otel.contract.units import format_duration
from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.judge.points import INVALID, Point, PointKind, invalid_on
from kc_otel.judge.refused_points import sender_of, sender_of_bytes
from kc_otel.stats.histogram import ExplicitHistogram

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


class KernelVersions:
    """Kernel versions of one contract, at most _MAX_KERNELS: the ones seen last."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], KernelInfo] = {}

    def see(self, attributes: dict[str, Scalar], now: float) -> bool:
        """Take the attributes of a kc.kernel.info point. Returns whether they name a kernel."""
        role, version = attributes.get("kc.kernel.role"), attributes.get("kc.kernel.version")
        if not (isinstance(role, str) and isinstance(version, str) and role and version):
            return False
        given = [(name, value) for name, value in attributes.items() if name not in _IDENTITY_ATTRIBUTES][:_MAX_FIELDS]
        fields = {name.removeprefix(_PREFIX)[:_MAX_CHARACTERS]: str(value)[:_MAX_CHARACTERS] for name, value in given}
        key = (role[:_MAX_CHARACTERS], version[:_MAX_CHARACTERS])
        self.know(KernelInfo(*key, fields, now))
        return True

    def know(self, info: KernelInfo) -> None:
        """Keep a version, and as many others as there is room for."""
        self.known[info.role, info.version] = info
        if len(self.known) > _MAX_KERNELS:
            del self.known[min(self.known, key=lambda name: self.known[name].last_seen)]


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
_HEARTBEATS: Final = 2.0
"""Heartbeats without a report after which a recorder is silent: one export of it may be late or lost."""

_MAX_NAMED: Final = 3
"""Recorders that a sentence names."""


class LastReport(NamedTuple):
    """The last report of a recorder."""

    at: float
    back: float = 0.0
    """When it reported again after it had been silent; 0 for never."""
    version: int = 0
    """metadata.version of the contract that it applies; 0 where it does not say."""
    otherwise: tuple[str, ...] = ()
    """Slices of the evaluator's contract that this one lacks, or defines in another way."""
    measured: float = 0.0
    """When it last reported new observations; 0 for never."""
    resumed: float = 0.0
    """When it did so again after a window without; 0 for never."""
    unmeasured: tuple[str, ...] = ()
    """Clauses of the evaluator's contract for which this one measures something else, or nothing."""

    @classmethod
    def of(cls, said: Sequence[Any]) -> LastReport:
        """The report that JSON has as a list."""
        at, back, version, otherwise, measured, resumed, unmeasured = said
        return cls(at, back, version, tuple(otherwise), measured, resumed, tuple(unmeasured))

    def not_after(self, now: float) -> LastReport:
        """The report with no time in it later than now."""
        return self._replace(
            at=min(self.at, now),
            back=min(self.back, now),
            measured=min(self.measured, now),
            resumed=min(self.resumed, now),
        )


class DriftCounts(NamedTuple):
    """Observations of the drift points of a message that share a serialized Resource and a temporality."""

    resource: bytes
    cumulative: bool
    total: int
    taken: dict[tuple[str, str], int]
    """Those of points that were taken as columns, by version of the inference kernel and slice."""


class Moved(NamedTuple):
    """A recorder that measures another version and has not shut down, as it was when it left this one."""

    at: float
    report: LastReport
    measured_on: dict[str, tuple[int, float]]


class Recorders:
    """Recorders that reported a kernel version and did not say that they are done with it; times are Unix seconds.

    Each exports within a `heartbeat`. `by_version` has the last reports by version and sender, `ended` when a recorder
    last said that it is done with a version, `moved` those that only went over to another, by the version that they
    left. `measured_on` has the observations and when the newest came, by version, sender and slice, and by `invalid_on`
    a slice those that failed an input check. Of `watched` slices, where something is broken, it outlasts the process.
    """

    def __init__(self, heartbeat: float, window: float) -> None:
        self.by_version: dict[str, dict[str, LastReport]] = {}
        self.ended: dict[str, float] = {}
        self.moved: dict[str, dict[str, Moved]] = {}
        self.watched: frozenset[str] = frozenset()
        self.measured_on: dict[str, dict[str, dict[str, tuple[int, float]]]] = {}
        self._leaving: dict[tuple[str, str], Moved] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._patience = _HEARTBEATS * heartbeat
        self._window = window

    def hear(self, version: str, sender: str, report: LastReport, *, done: bool) -> None:
        """Note that a recorder reports a kernel version, or is done with it: it shuts down, or records another."""
        senders = self.by_version.pop(version, {})
        self.by_version[version] = senders  # the newest is at the end
        while len(self.by_version) > _MAX_VERSIONS:
            oldest = next(iter(self.by_version))
            del self.by_version[oldest]
            self.ended.pop(oldest, None)
            self.moved.pop(oldest, None)
            self._counts.pop(oldest, None)
            self.measured_on.pop(oldest, None)
        if done:
            seen = self.measured_on.get(version, {}).pop(sender, {})
            self._leaving[version, sender] = Moved(report.at, senders.pop(sender, report), seen)
            self.ended[version] = report.at
            return
        before = senders.pop(sender, None)  # the newest is at the end
        if (left := self.moved.get(version, {}).pop(sender, None)) is not None:
            before = left.report
            self.measured_on.setdefault(version, {})[sender] = left.measured_on
        if before is None and sum(map(len, self.by_version.values())) >= _MAX_RECORDERS:
            self._forget()
        if before is not None:
            was_silent = report.at - before.at > self._patience
            report = report._replace(
                back=report.at if was_silent else before.back,
                measured=max(report.measured, before.measured),
                resumed=max(report.resumed, before.resumed),
            )
        senders[sender] = report

    def _forget(self) -> None:
        """Tell the recorder heard longest ago, of the version heard longest ago, no longer apart."""
        for version, senders in self.by_version.items():
            if (sender := next((name for name in senders if name != _MORE_RECORDERS), None)) is not None:
                senders[_MORE_RECORDERS] = senders.pop(sender)
                self._counts.get(version, {}).pop(sender, None)
                self.measured_on.get(version, {}).pop(sender, None)
                return

    def observe(self, version: str, sender: str, total: int, new: int, now: float) -> None:
        """Note the observations that a recorder reports: in `total` since its start, `new` since its last report."""
        report, counts = self.by_version.get(version, {}).get(sender), self._counts.setdefault(version, {})
        if report is None:
            counts.pop(sender, None)
            return
        # What it had observed before the evaluator began is no news, unless nobody had ever heard of it.
        known = counts.get(sender, total if report.measured else 0)
        counts[sender] = total
        begun_anew = total < known
        if new or total > (0 if begun_anew else known):
            resumed = now if now - report.measured > self._window else report.resumed
            self.by_version[version][sender] = report._replace(measured=now, resumed=resumed)

    def measured_on_watched(self) -> dict[str, dict[str, dict[str, tuple[int, float]]]]:
        """What `measured_on` has of watched slices."""
        if not self.watched:
            return {}
        names = self.watched | {invalid_on(slice) for slice in self.watched}
        return {
            version: {sender: {name: seen[name] for name in names & seen.keys()} for sender, seen in senders.items()}
            for version, senders in self.measured_on.items()
        }

    def observe_on(self, version: str, sender: str, counts: Mapping[tuple[str, bool], int], now: float) -> None:
        """`observe` by slice, and whether it is since the start; what was counted before the first look may be news."""
        if sender not in self.by_version.get(version, {}):
            return
        seen = self.measured_on.setdefault(version, {}).setdefault(sender, {})
        for (slice, cumulative), count in counts.items():
            known = seen.get(slice, (0, 0.0))[0] if cumulative else 0
            if count not in {0, known}:
                seen[slice] = count * cumulative, now

    def merge(self, version: str, sender: str, report: LastReport, *, done: bool, moved: bool) -> None:
        """Note what another process has heard: one that begins tells all that it remembers, also what is over."""
        known = self.by_version.get(version, {}).get(sender)
        if report.at > (self.ended.get(version, -math.inf) if known is None else known.at):
            self.hear(version, sender, report, done=done)
            self.move(sender, {version: done} | ({_ANOTHER_VERSION: False} if moved else {}), report.at)

    def all_ended(self, version: str, last: float) -> bool:
        """Return True if each recorder of a version is done with it, and it was not heard of after that."""
        ended = self.ended.get(version)
        return ended is not None and not self.by_version.get(version) and ended >= last

    def move(self, sender: str, done: Mapping[str, bool], now: float) -> None:
        """Note all that a recorder says of versions in one message: where it is done with each, it shuts down."""
        shuts_down = all(done.values())
        for version in self.moved if shuts_down else [version for version, left in done.items() if not left]:
            self.moved.get(version, {}).pop(sender, None)
        for version in [version for version, left in done.items() if left]:
            left = self._leaving.pop((version, sender), None) or Moved(now, LastReport(now), {})
            if not shuts_down and version in self.by_version:
                full = sum(map(len, self.moved.values())) >= _MAX_RECORDERS
                senders = self.moved.setdefault(version, {})
                senders.setdefault(_MORE_RECORDERS if full and sender not in senders else sender, left)

    def moved_since(self, version: str, since: float = -math.inf) -> bool:
        """Return True if a recorder of a version measures another one, since a Unix time in seconds or later."""
        return any(left.at >= since for left in self.moved.get(version, {}).values())

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
        silent, all_of_it = self.silent(version, silence), len(self.by_version.get(version, ()))
        lately = sorted((quiet, sender) for sender, quiet in silent.items() if quiet <= lasting)
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

    def unheard(
        self,
        version: str,
        slice: str,
        span: tuple[float, float],
        now: float,
        silence: Callable[[float], float],
        *,
        invalid: bool = False,
    ) -> bool:
        """Return True if a recorder that reported a version during a breach has not been heard of since.

        One that reports and has observed nothing more shows nothing either: it was drained, and may serve again. So may
        one that observes other slices than the one that it was seen to break, or another version since. One that was
        silent or drained and returns is heard once all of a window is from after its return. `span` has the times of
        the breach's onset and of the last FAIL; where what broke was `invalid` input, of the last that was.
        """
        silent, moved = self.silent(version, silence), self.moved.get(version, {})
        seen = {sender: left.measured_on for sender, left in moved.items()} | self.measured_on.get(version, {})
        reports = {sender: left.report for sender, left in moved.items()} | self.by_version.get(version, {})
        broke = invalid_on(slice) if invalid else slice

        def last(sender: str, name: str) -> float:
            return seen.get(sender, {}).get(name, (0, 0.0))[1]

        return any(
            (span[0] <= last(sender, broke) and last(sender, slice) <= span[1])
            or min(report.at, report.measured or report.at) <= span[1]
            or sender in silent
            or now - max(report.back, report.resumed) < self._window
            for sender, report in reports.items()
            if report.at > span[0] - self._patience
            if not 0.0 < report.measured <= span[0] - self._window
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
        for version, senders in self.by_version.items():
            for report in senders.values():
                if (report.otherwise or report.unmeasured) and now - report.at <= max(self._patience, self._window):
                    yield version, report

    def turn_back(self, now: float) -> None:
        """The clock went back: none reported later than now."""
        for moved in self.moved.values():
            for sender, left in moved.items():
                seen = {slice: (total, min(at, now)) for slice, (total, at) in left.measured_on.items()}
                moved[sender] = Moved(min(left.at, now), left.report.not_after(now), seen)
        for senders in self.by_version.values():
            for sender, report in senders.items():
                senders[sender] = report.not_after(now)
        for seen_on in (seen for senders in self.measured_on.values() for seen in senders.values()):
            seen_on.update({slice: (total, min(at, now)) for slice, (total, at) in seen_on.items()})


class RecorderReports:
    """The recorders that report themselves in a message, and how many observations they say of in it.

    `columns` is None where the message is a request; `drift_counts` returns the observations in the columns.
    """

    def __init__(
        self,
        columns: ColumnMessage | None,
        drift_counts: Callable[[ColumnMessage], Iterable[DriftCounts]],
    ) -> None:
        self._columns = None if columns is None or columns.whole else columns
        self._drift_counts = drift_counts
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._counts_on: dict[tuple[str, str], Counter[tuple[str, bool]]] = defaultdict(Counter)
        self._found: list[tuple[Recorders, str, str]] = []
        self._done: dict[tuple[Recorders, str], dict[str, bool]] = {}

    def add(self, recorders: Recorders, version: str, sender: str, *, done: bool) -> None:
        """Note that a recorder reports a kernel version, or is done with it."""
        self._found.append((recorders, version, sender))
        self._done.setdefault((recorders, sender), {})[version] = done

    def count(self, point: Point) -> None:
        """Count the observations of a point, unless the columns have it."""
        if point.histogram is None or not (point.kind is PointKind.HISTOGRAM or point.metric == INVALID):
            return
        sender, count = sender_of(point.resource), point.histogram.count
        version, slice = (str(point.attributes.get(name, "")) for name in ("kc.kernel.inference", "kc.slice"))
        if point.metric == INVALID:
            slice = invalid_on(slice)
        elif self._columns is None or isinstance(point.histogram, ExplicitHistogram):
            self._counts[sender, point.cumulative] += count
        self._counts_on[sender, version][slice, point.cumulative] += count

    def tell(self, now: float) -> None:
        """Tell what the recorders have observed, at the end of a message that arrived at `now`, Unix seconds."""
        if self._found and self._columns is not None:
            for counts in self._drift_counts(self._columns):
                sender = sender_of_bytes(counts.resource)
                self._counts[sender, counts.cumulative] += counts.total
                for (version, slice), count in counts.taken.items():
                    self._counts_on[sender, version][slice, counts.cumulative] += count
        for recorders, version, sender in self._found:
            recorders.observe(version, sender, self._counts[sender, True], self._counts[sender, False], now)
            recorders.observe_on(version, sender, self._counts_on[sender, version], now)
        for (recorders, sender), done in self._done.items():
            recorders.move(sender, done, now)
