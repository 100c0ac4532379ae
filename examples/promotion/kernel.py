"""One version of the inference kernel in a process of its own: `POST /generate` continues prompts.

    python -m examples.promotion.kernel FILE.pt VERSION

prints its port. Versions are those of VERSIONS.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch

from examples.demo.__main__ import int8
from examples.demo.corpus import SLICES, Text, load_corpus
from examples.demo.model import Config, Model
from examples.demo.sampler import Sampler
from kc_otel import Kernel

VERSIONS = {
    "bf16": Kernel("demo-sampler", version="1", dtype="bfloat16"),
    "int8": Kernel("demo-sampler", version="2", dtype="bfloat16", quantization="w8a8"),
    "int8-mended": Kernel("demo-sampler", version="3", dtype="bfloat16", quantization="w8a8"),
}


def load_model(weights: Path) -> Model:
    """The training kernel, from a file of its weights."""
    model = Model(Config())
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def sampler(version: str, model: Model, corpus: dict[str, Text]) -> Sampler:
    """A version of the inference kernel; `int8` was calibrated on code and prose, and nobody thought of the tables."""
    if version == "bf16":
        return Sampler(model)
    return int8(model, corpus, slices=("code", "prose") if version == "int8" else SLICES)


def serve(kernel: Sampler) -> HTTPServer:
    """A server on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            ids, logprobs = kernel.generate(torch.tensor(asked["prompts"]), asked["length"])
            body = json.dumps({"ids": ids.tolist(), "logprobs": logprobs.tolist()}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return HTTPServer(("127.0.0.1", 0), Handler)


def main() -> None:
    """Serve one version until the process is stopped."""
    torch.set_num_threads(1)
    weights, version = Path(sys.argv[1]), sys.argv[2]
    server = serve(sampler(version, load_model(weights), load_corpus()))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
