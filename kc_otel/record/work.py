"""Items in a recorder's queue, on the way from the caller's thread to the measuring thread.

A batch is made with the caller's own arrays, NumPy, torch or plain numbers. Once there is room for it, `taken` copies
them on the caller's thread, on the device where they are and without waiting for it; the measuring thread lays them
out.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from opentelemetry import trace
from opentelemetry.context import Context

from kc_otel.contract.slices import Scalar
from kc_otel.record.kernel import KernelPair
from kc_otel.record.measure.arrays import as_bool, is_tensor, on_host
from kc_otel.record.slice_table import own_attributes

Tree = Any
"""An array of NumPy or torch, a list of them, one per sequence, or None."""
DeviceEvent = Any
"""A `torch.cuda.Event`, or None."""
_RELAXED_CAPTURE: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_thread = threading.local()
_NUMBER: Final = (int, float, np.generic)
Processing = Mapping[str, Scalar]
"""Temperature, top-p and the like, by name."""
TokenWeights = Any
"""A weight version, or the optimizer step of each token: integers [sequences, tokens], or a list of them."""
Weights = int | str | None
"""A weight version: an optimizer step, or a name where there is no step."""
Role = Literal["sampled", "scored"]
"""Side of a pair: sampled by the inference kernel, or scored by the training kernel."""
Kind = Literal["sampled", "logits", "operator", "routes", "value", "side"]
"""A comparison of sampled tokens, logits, outputs or routes; an observation; one kernel's side of a comparison."""


def size_of(data: Tree) -> int:
    """Bytes that a copy of `data` takes."""
    if data is None:
        return 0
    if isinstance(data, list | tuple):
        return sum(8 if isinstance(item, _NUMBER) else size_of(item) for item in data)
    if is_tensor(data):
        return int(data.numel() * data.element_size())
    return int(np.asarray(data).nbytes)


def taken(data: Tree) -> Tree:
    """A copy that the caller cannot reach, without its autograd graph."""
    if data is None:
        return None
    if isinstance(data, list | tuple):
        if all(isinstance(item, _NUMBER) for item in data):
            return np.array(data)
        return [taken(item) for item in data]
    if is_tensor(data):
        return data.detach().clone()
    return np.array(data)


def device_ready(*data: Tree) -> DeviceEvent:
    """An event on the caller's CUDA stream after which the copies are complete; None when all of them are on the CPU.

    RuntimeError if the stream is being captured into a CUDA graph, where nothing else may be enqueued.
    """
    items = (item for tree in data for item in (tree if isinstance(tree, list) else (tree,)))
    device = next((item.device for item in items if is_tensor(item) and item.is_cuda), None)
    if device is None:
        return None
    torch = sys.modules["torch"]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured; compare outside of it")
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def measuring(ready: DeviceEvent) -> AbstractContextManager[Any]:
    """The context in which a thread measures: no autograd, and on CUDA a stream of its own that waits for `ready`.

    On a stream of its own, reading results back waits for the measuring alone and not for the caller's kernels.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return nullcontext()
    if ready is None:
        return torch.no_grad()  # type: ignore[no-any-return]
    _allow_captures()
    stream = torch.cuda.Stream(device=ready.device)
    stream.wait_event(ready)
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.cuda.stream(stream))
    return stack


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Arrays of a batch with one row per sequence, [sequences, tokens, ...]; None for those not given."""

    arrays: dict[str, Any]
    kept: list[int]  # index of each row in what the caller gave; others' arrays differ in length
    given: int  # sequences that the caller gave


def laid_out(arrays: dict[str, Tree], *, like: str, trailing: int = 0) -> Rows:
    """Rows from what was taken: one sequence becomes a batch of one, lists are padded and the padding masked.

    Arrays that do not fit each other are left to the input checks, except in lists, where rows of different lengths
    have to be left out before the others can be stacked. The array `like` says how many sequences there are, and has so
    many `trailing` axes after [sequences, tokens]: 1 for logits.
    """
    if any(isinstance(tree, list) for tree in arrays.values()):
        return _with_a_column(_padded(arrays, like), like)
    if np.ndim(arrays[like]) == 0:
        raise ValueError(f"{like}: is one number; give those of a sequence, [tokens]")
    given = {name: tree for name, tree in arrays.items() if tree is not None}
    if not (trailing and all(is_tensor(tree) for tree in given.values())):  # logits are measured where they are
        given = {name: on_host(tree) for name, tree in given.items()}
    if given[like].ndim == 1 + trailing:
        given = {
            name: tree if name == "advantages" and tree.shape == (1,) else tree[None] for name, tree in given.items()
        }
    sequences, tokens = given[like].shape[:2]
    if (versions := given.get("versions")) is not None and versions.ndim == 1:  # the step of each sequence
        given["versions"] = np.broadcast_to(versions[:, None], (sequences, tokens))
    return _with_a_column(Rows({name: given.get(name) for name in arrays}, list(range(sequences)), sequences), like)


def _with_a_column(rows: Rows, like: str) -> Rows:
    """The same, where no sequence has a token, with one that does not count."""
    if not rows.kept or rows.arrays[like].shape[1]:
        return rows
    arrays = {
        name: np.zeros((len(rows.kept), 1, *data.shape[2:])) if data is not None and data.ndim > 1 else data
        for name, data in rows.arrays.items()
    }
    return replace(rows, arrays=arrays | {"mask": np.zeros((len(rows.kept), 1), np.bool_)})


def row_of(data: Tree, row: int) -> Any:
    """Return a row of a list or array, on the host; a single row belongs to all sequences, None to none."""
    if data is None:
        return ()
    if isinstance(data, list) or data.ndim > 1:
        return on_host(data[row])
    return on_host(data)


def per_sequence(name: str, data: Tree, sequences: int) -> NDArray[np.float64]:
    """Return a number for each sequence, float64 [sequences]; NaN for None."""
    if isinstance(data, list):
        data = [np.nan if value is None else on_host(value) for value in data]
        if any(np.size(value) != 1 for value in data):
            raise ValueError(f"{name}: not one number for each sequence; one has {max(map(np.size, data))}")
        found = np.array([np.reshape(value, ()) for value in data], dtype=np.float64)
    else:
        found = np.atleast_1d(on_host(data)).astype(np.float64)
    if found.shape != (sequences,):
        raise ValueError(f"{name}: shape {found.shape} for {sequences} sequences; give one number for each")
    return found


def _padded(arrays: dict[str, Tree], like: str) -> Rows:
    lists = {name: [np.atleast_1d(on_host(item)) for item in tree] for name, tree in arrays.items() if tree is not None}
    sequences = len(lists[like])
    for name, rows in lists.items():
        if len(rows) != sequences:
            raise ValueError(f"{name}: {len(rows)} sequences, but {like} has {sequences}")
        if name in {"advantages", "versions"}:  # one number is that of all tokens
            sizes = [row.shape[0] for row in lists[like]]
            lists[name] = [np.full(n, a[0]) if a.shape == (1,) else a for a, n in zip(rows, sizes, strict=True)]
    kept = [i for i in range(sequences) if len({rows[i].shape[0] for rows in lists.values()}) == 1]
    lengths = np.array([lists[like][i].shape[0] for i in kept], dtype=np.int64)
    width = int(lengths.max(initial=0))
    out = {name: _stacked([rows[i] for i in kept], width) for name, rows in lists.items() if kept}
    inside = np.arange(width) < lengths[:, None]
    out["mask"] = inside & as_bool(out["mask"]) if "mask" in out else inside
    return Rows({name: out.get(name) for name in {**arrays, "mask": None}}, kept, sequences)


def _stacked(rows: Sequence[Any], width: int) -> Any:
    out = np.zeros((len(rows), width, *rows[0].shape[1:]), dtype=np.result_type(*rows))
    for row, into in zip(rows, out, strict=True):
        into[: row.shape[0]] = row
    return out


def _allow_captures() -> None:
    """Let this thread allocate and wait while another one captures a CUDA graph, which would otherwise be invalid.

    Source: CUDA driver API, cuThreadExchangeStreamCaptureMode: a thread in relaxed mode may call what is unsafe in a
    capture, and this thread captures nothing.
    """
    if getattr(_thread, "relaxed", False):
        return
    _thread.relaxed = True
    with suppress(OSError, AttributeError):  # no driver of NVIDIA's, or one from before such modes
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED_CAPTURE)))


@dataclass(frozen=True, slots=True, eq=False)
class QueuedBatch:
    """A call of the recorder that waits to be measured."""

    kind: Kind
    pair: KernelPair  # the kernel pair that was current
    arrays: Mapping[str, Tree]  # None for those not given
    settings: Mapping[str, Any]
    attributes: Any = None  # of the sequences, as they were given; once taken, `OwnAttributes`
    parent: Context | None = None  # trace context of the caller
    links: Sequence[trace.SpanContext] = ()  # further spans that the batch belongs to
    at: int = 0  # when it was given to the recorder, unix nanoseconds
    ready: DeviceEvent = None  # after it the copies are complete; None where none of them is on a device

    @property
    def nbytes(self) -> int:
        """Bytes that a copy of the arrays takes."""
        return sum(size_of(data) for data in self.arrays.values())

    @property
    def per_token(self) -> dict[str, Tree]:
        """The arrays with one value, or one row of logits, per sampled token."""
        return {name: data for name, data in self.arrays.items() if name not in {"prompts", "rewards"}}

    @property
    def spans(self) -> tuple[trace.SpanContext, ...]:
        """Contexts of the spans that it belongs to: the caller's, and further ones."""
        current = trace.get_current_span(self.parent).get_span_context()
        return (*((current,) if current.is_valid else ()), *self.links)

    def taken(self) -> QueuedBatch:
        """The same, which the caller cannot change any more, with its arrays on the device where they are."""
        arrays = {name: taken(data) for name, data in self.arrays.items()}
        attributes, links = own_attributes(self.attributes), tuple(self.links)
        return replace(self, arrays=arrays, attributes=attributes, links=links, ready=device_ready(*arrays.values()))


Work = QueuedBatch | KernelPair
"""Items that wait in the queue: a batch, or the kernel pair that is the current one from there on."""
