"""llama.cpp on the Q4_1 file itself: its C functions, as the wheel xllamacpp carries them, called with all logits kept.

Its server tells the log-probabilities of sampled tokens, but a whole vocabulary only as JSON, megabytes a token. Keys
and values are in float16 and activations in 8 bits, llama.cpp's own choice for a file in Q4_1.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import numpy as np

_ROOM: Final = 512
"""More bytes than any of llama.cpp's structs of parameters has: they are only passed on, but for the first fields."""
_BATCH: Final = 512


class _Parameters(ctypes.Structure):
    """Parameters of a model or a context, of which the context's begin with these four in every version."""

    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * (_ROOM - 16)),
    )


class _Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {  # name: result, arguments
    "llama_backend_init": (None,),
    "llama_model_default_params": (_Parameters,),
    "llama_context_default_params": (_Parameters,),
    "llama_model_load_from_file": (ctypes.c_void_p, ctypes.c_char_p, _Parameters),
    "llama_init_from_model": (ctypes.c_void_p, ctypes.c_void_p, _Parameters),
    "llama_set_n_threads": (None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32),
    "llama_n_seq_max": (ctypes.c_uint32, ctypes.c_void_p),
    "llama_batch_init": (_Batch, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
    "llama_decode": (ctypes.c_int32, ctypes.c_void_p, _Batch),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_int32),
    "llama_get_memory": (ctypes.c_void_p, ctypes.c_void_p),
    "llama_memory_clear": (None, ctypes.c_void_p, ctypes.c_bool),
    "llama_memory_seq_cp": (None, ctypes.c_void_p, *(ctypes.c_int32,) * 4),
    "llama_log_set": (None, ctypes.c_void_p, ctypes.c_void_p),
}
_SILENT: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


class LlamaCpp:
    """A model in GGUF that gives the logits of several sequences' next tokens."""

    def __init__(self, file: Path, *, vocabulary: int, sequences: int, context: int, threads: int) -> None:
        import xllamacpp.xllamacpp as wheel  # noqa: PLC0415 - only who runs llama.cpp needs it

        self._c = ctypes.CDLL(wheel.__file__)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        self._c.llama_log_set(ctypes.cast(_SILENT, ctypes.c_void_p), None)
        self._c.llama_backend_init()
        model = self._c.llama_model_load_from_file(str(file).encode(), self._c.llama_model_default_params())
        wanted = self._c.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = sequences * context, _BATCH, _BATCH
        wanted.n_seq_max = sequences
        self._context = self._c.llama_init_from_model(model, wanted) if model else None
        if not self._context or self._c.llama_n_seq_max(self._context) != sequences:
            raise RuntimeError(f"llama.cpp cannot run {file} with {sequences} sequences of {context} tokens")
        self._c.llama_set_n_threads(self._context, threads, threads)
        self._memory = self._c.llama_get_memory(self._context)
        self._batch = self._c.llama_batch_init(_BATCH, 0, 1)
        self._vocabulary, self._sequences = vocabulary, sequences

    def begin(self, prompt: list[int]) -> np.ndarray:
        """Forget what was; the logits [vocabulary] after a prompt that all sequences now have."""
        self._c.llama_memory_clear(self._memory, True)
        for start in range(0, len(prompt), _BATCH):
            part = prompt[start : start + _BATCH]
            self._decode([(token, start + i, 0) for i, token in enumerate(part)], [len(part) - 1])
        for sequence in range(1, self._sequences):
            self._c.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        return self._logits(len(prompt) % _BATCH - 1 if len(prompt) % _BATCH else _BATCH - 1)

    def next(self, tokens: list[int], position: int) -> np.ndarray:
        """The logits [sequences, vocabulary] after one more token of each sequence."""
        rows = range(len(tokens))
        self._decode([(token, position, row) for row, token in enumerate(tokens)], rows)
        return np.stack([self._logits(row) for row in rows])

    def _decode(self, tokens: list[tuple[int, int, int]], wanted: Any) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, i in wanted
        if status := self._c.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {status}")

    def _logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, row), (self._vocabulary,)).copy()
