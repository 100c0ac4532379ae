"""A checkpoint in ONNX Runtime: exported by torch, its weights in int8, and sampled from: another's kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def exported(model: Any, into: Path) -> Path:
    """A Hugging Face causal model as an ONNX graph from input_ids to logits, in float32; returns `into`."""
    import torch  # noqa: PLC0415 - only who exports needs it

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, use_cache=False).logits

    most = model.config.max_position_embeddings
    shape = {0: torch.export.Dim("sequences"), 1: torch.export.Dim("tokens", max=most)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about itself
        torch.onnx.export(
            Logits().eval(),
            (torch.zeros(2, 16, dtype=torch.long),),
            into,
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": shape},
            external_data=False,
            verbose=False,
        )
    return into


def in_int8(graph: Path, into: Path) -> Path:
    """The graph with its matrices in int8, a scale per output channel; activations are quantised as it runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415

    quantize_dynamic(graph, into, weight_type=QuantType.QInt8, per_channel=True)
    return into


class OnnxKernel:
    """Samples with ONNX Runtime, at temperature 1 and from all tokens.

    Args:
        graph: What `exported` or `in_int8` wrote.
        seed: Of the sampling.
    """

    def __init__(self, graph: Path, seed: int = 0) -> None:
        import onnxruntime  # noqa: PLC0415 - loaded where it is used

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._random = np.random.default_rng(seed)

    def sample(self, prompts: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Go on from prompts.

        Args:
            prompts: Token ids [sequences, prompt tokens], all of one length.
            tokens: How many to add.

        Returns:
            Token ids and log-probabilities in nats, [sequences, tokens] each.
        """
        ids, found = prompts.astype(np.int64), []
        for _ in range(tokens):
            logits = self._session.run(None, {"input_ids": ids})[0][:, -1].astype(np.float64)
            logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            # The Gumbel-max trick: the largest of logits and independent noise is a sample of the softmax.
            drawn = (logprobs + self._random.gumbel(size=logprobs.shape)).argmax(-1)[:, None]
            found.append(np.take_along_axis(logprobs, drawn, -1))
            ids = np.concatenate((ids, drawn), axis=1)
        return ids[:, prompts.shape[1] :], np.concatenate(found, axis=1)


def sampled(
    model: Any, checkpoint: Path, begun: np.ndarray, tokens: int, folder: Path
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Number formats, and what ONNX Runtime samples in each: tokens and their log-probabilities, [S, tokens] each."""
    del checkpoint  # it is `model`
    graph = exported(model, folder / "float32.onnx")
    yield "float32", *OnnxKernel(graph).sample(begun, tokens)
    yield "int8", *OnnxKernel(in_int8(graph, folder / "int8.onnx")).sample(begun, tokens)
