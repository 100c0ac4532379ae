"""Train a model, serve it with another kernel, break that kernel, and watch the contract catch it.

python -m examples.demo [--no-fault] [--quick] [--weights FILE] [--stay]
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from examples.demo.corpus import SLICES, Text, load_corpus
from examples.demo.evaluator import evaluating, receiving
from examples.demo.located import WEIGHTS
from examples.demo.model import Config, Model
from examples.demo.sampler import Sampler
from examples.demo.serving import Server
from examples.demo.story import Story, StoryError
from examples.demo.terminal import Terminal
from examples.demo.train import held_out_bits, train, windows
from kc_otel import Kernel, load_contract
from kc_otel.client.router import Router
from kc_otel.client.webhooks import new_secret

CONTRACT = Path(__file__).with_name("contract.yaml")
KERNELS = os.path.relpath(Path(__file__).with_name("located.py"))
STEPS, QUICK_STEPS = 400, 200
CALIBRATION_ROWS = 64
LOCATE = (
    f"kc-otel locate run {os.path.relpath(CONTRACT)} --train {KERNELS}:train --infer {KERNELS}:int8 "
    f"--sequences {KERNELS}:sequences"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--no-fault", action="store_true", help="calibrate the int8 kernel well: nothing should fire")
    parser.add_argument("--quick", action="store_true", help="train for less than half as long")
    parser.add_argument("--weights", type=Path, help="keep the trained model in this file, or take it from there")
    parser.add_argument("--stay", action="store_true", help="go on serving at the end, until Ctrl-C")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell script has what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal = Terminal()
    try:
        corpus, model = trained(terminal, QUICK_STEPS if options.quick else STEPS, options.weights)
        tell(terminal, corpus, model, fault=not options.no_fault, quick=options.quick, stay=options.stay)
    except KeyboardInterrupt:
        terminal.say("stopped")
        return 130
    except (StoryError, RuntimeError) as error:
        terminal.say(f"FAILED: {error}", "bold red")
        return 1
    return 0


def tell(terminal: Terminal, corpus: dict[str, Text], model: Model, *, fault: bool, quick: bool, stay: bool) -> None:
    """Acts 2 to 5, and what they came to."""
    torch.set_num_threads(1)  # decoding steps are too small to share, and the evaluator wants a core
    contract, secret = load_contract(CONTRACT), new_secret()
    webhooks: queue.Queue[dict[str, Any]] = queue.Queue()
    with ExitStack() as stack:
        terminal.heading("2. An evaluator, a webhook receiver, a router, a recorder")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kc-otel-demo-")))
        webhook = stack.enter_context(receiving(secret, webhooks.put))
        evaluator = stack.enter_context(evaluating(CONTRACT, folder, webhook, secret))
        terminal.say(f"$ {' '.join(evaluator.command)}")
        terminal.say(f"webhooks go to {webhook}")
        terminal.say(f"live: {evaluator.api} in a browser, `kc-otel status --url {evaluator.api}` in a terminal")
        export_to(evaluator.otlp)
        router = stack.enter_context(Router(evaluator.api, contracts=[contract]))
        router.wait_for_table(10.0)  # without one nothing is served that was not promoted
        training_kernel = Kernel("torch", version=torch.__version__, dtype="float32", attention="sdpa")
        server = Server(contract, model, training_kernel, router)
        stack.callback(server.close)
        story = Story(terminal, corpus, server, evaluator, router, webhooks)
        story.names[training_kernel.fingerprint] = "train"

        terminal.heading("3. The contract holds")
        story.roll_out("bf16", kernel("1", "none"), Sampler(model))
        story.serve(story.all_pass, 240, "not every cell of the contract passes")
        terminal.moment("every cell of the contract passes", "bold green")
        story.show()

        if fault:
            broken(terminal, story, model, corpus)
        else:
            healthy(terminal, story, model, corpus, seconds=25 if quick else 45)
        terminal.heading("What happened")
        terminal.timeline()
        what_next(terminal, evaluator.api, fault=fault, stay=stay)
        if stay:
            try:
                story.serve(lambda: False, float("inf"), "")
            except KeyboardInterrupt:
                terminal.say("stopped")


def export_to(endpoint: str) -> None:
    """Have this process's telemetry go there, whatever the user's own OTEL_* variables and proxies say."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"


def trained(terminal: Terminal, steps: int, weights: Path | None) -> tuple[dict[str, Text], Model]:
    """Act 1: the model, and how well it predicts text that it has not seen."""
    terminal.heading("1. A language model, from the text that this Python carries")
    corpus = load_corpus()
    sizes = ", ".join(f"{name} {len(text.train) / 1e6:.1f} MB" for name, text in corpus.items())
    terminal.say(f"corpus: {sizes}; a tenth of each is held out")
    began = time.monotonic()

    def progress(step: int, bits: float) -> None:
        if step % 50 == 0:
            left = (time.monotonic() - began) / step * (steps - step)
            terminal.say(f"step {step} of {steps}: {bits:.2f} bits per byte, about {left:.0f} s left")

    if weights is not None and weights.exists():
        model = Model(Config())
        model.load_state_dict(torch.load(weights, weights_only=True))
        terminal.say(f"weights from {weights}")
    else:
        model = train(corpus, steps, progress)
        seconds = time.monotonic() - began
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        terminal.moment(f"trained a transformer of {parameters:.2f}M parameters in {seconds:.0f} s")
        if weights is not None:
            torch.save(model.state_dict(), weights)
    WEIGHTS.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), WEIGHTS)  # for kc-otel locate run
    bits = {name: held_out_bits(model, text) for name, text in corpus.items()}
    terminal.rows(
        ("held-out bits per byte", "model", "byte frequencies", "chance"),
        ((name, f"{own:.2f}", f"{unigram:.2f}", "8.00") for name, (own, unigram) in bits.items()),
    )
    if any(own > unigram - 0.5 for own, unigram in bits.values()):
        raise StoryError("the model does not predict clearly better than byte frequencies do")
    return corpus, model


def kernel(version: str, quantization: str, calibration: str = "none") -> Kernel:
    """A version of the sampler, as it is recorded."""
    return Kernel(
        "demo-sampler",
        version=version,
        dtype="bfloat16",
        quantization=quantization,
        kv_cache_dtype="bfloat16",
        attention="sdpa",
        extra={"calibration": calibration},
    )


def int8(model: Model, corpus: dict[str, Text], *, slices: tuple[str, ...]) -> Sampler:
    """The int8 sampler, calibrated on text of these slices in equal parts."""
    rows = [corpus[name].train for name in slices for _ in range(CALIBRATION_ROWS // len(slices))]
    fixed = torch.Generator().manual_seed(0)
    return Sampler(model, calibration=windows(rows, model.config.context, fixed))


def broken(terminal: Terminal, story: Story, model: Model, corpus: dict[str, Text]) -> None:
    """Acts 4 and 5: int8 with scales that do not fit one slice; alert, webhook, route, recovery."""
    terminal.heading("4. int8 is rolled out, its scales calibrated on code and prose: nobody thought of the tables")
    rolled_out = terminal.elapsed
    seen = ("code", "prose")
    story.roll_out("int8", kernel("2", "w8a8", "code+prose"), int8(model, corpus, slices=seen))
    story.serve(lambda: bool(story.firing), 180, "no webhook arrived")
    clause, slice = story.failed[0]
    if slice == "all":
        raise StoryError("the average failed before any slice did")
    terminal.say(f"{clause} fails on {slice}; on all traffic together it is {story.overall(clause)}", "bold")
    story.show()
    story.serve(lambda: story.route_reason(slice) is not None, 60, "the route did not change")

    terminal.heading("5. The slice is back on the training kernel, and the contract recovers")
    story.serve(story.recovered, 240, "the alert did not resolve")
    terminal.moment(
        f"recovered {terminal.elapsed - rolled_out:.0f} s after the roll-out: what failed passes on the kernel that "
        "serves it now; int8 is contained, not repaired",
        "bold green",
    )
    story.show()


def healthy(terminal: Terminal, story: Story, model: Model, corpus: dict[str, Text], *, seconds: float) -> None:
    """Act 4 without the fault: the same int8, calibrated on every slice."""
    terminal.heading("4. int8 is rolled out, its scales calibrated on every slice")
    story.roll_out("int8", kernel("2", "w8a8", "+".join(SLICES)), int8(model, corpus, slices=SLICES))
    began = terminal.elapsed
    story.serve(lambda: terminal.elapsed - began > seconds, 10 * seconds, "the evaluator was not heard")
    story.show()
    if story.alerts or story.failed:
        raise StoryError(f"{story.alerts} alerts fired although nothing was wrong")
    if story.overall("token-tv") != "PASS":
        raise StoryError(f"too little was measured: token-tv on all traffic is {story.overall('token-tv')}")
    terminal.moment("no alert fired", "bold green")


def what_next(terminal: Terminal, api: str, *, fault: bool, stay: bool) -> None:
    """Commands that lead on from here."""
    terminal.heading("What to do next")
    contract = os.path.relpath(CONTRACT)
    other = ("make demo ARGS=--no-fault", "the same with well-calibrated scales: no alert fires")
    lines = [
        other if fault else ("make demo", "the same with scales that fit only part of the traffic"),
        (f"kc-otel check {contract}", "what the contract promises, with file and line for what is wrong in it"),
        (f"kc-otel serve {contract} --no-webhooks", "the evaluator by itself, for your own recorder"),
        ("kc-otel check contracts/", "contracts to start from"),
    ]
    if fault:
        where = f"--incident worst --url {api}" if stay else "--slice tables"
        lines.insert(0, (f"{LOCATE} {where}", "which operator of the int8 kernel it is, and its share of the drift"))
    if stay:
        resume = "kc-otel route resume demo-bytes --slice tables --why 'recalibrated'"
        lines = [
            (f"kc-otel status --url {api}", f"this, as at {api} in a browser; Ctrl-C here ends it"),
            (f"{resume} --url {api}", "give the slice back to the inference kernel"),
            *lines,
        ]
    else:
        lines.insert(
            1, ("make demo ARGS=--stay", "go on serving at the end, to look around in a browser or with kc-otel status")
        )
    if shutil.which("kc-otel") is None:  # `make demo` installs it, and puts it on nobody's path
        lines.insert(0, (f'PATH="{Path(sys.executable).parent}:$PATH"', "where kc-otel is"))
    for command, what in lines:
        terminal.console.print(f"  {command}\n      {what}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
