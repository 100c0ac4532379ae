"""The whole life of one bad kernel version, and of the one that mends it, told as it happens.

python -m examples.promotion [--weights FILE] [--keep FOLDER]

An int8 kernel whose scales nobody calibrated on tables is refused by the gate in CI, forced through by a person, caught
on one slice of the canary's traffic, and taken back. Its successor goes through shadow and canary to full. The
evaluator, the command line and each version of the kernel are processes of their own; verdicts come from nowhere else.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from examples.demo.__main__ import export_to
from examples.demo.corpus import SLICES, Text, load_corpus
from examples.demo.evaluator import evaluating
from examples.demo.model import Model
from examples.demo.serving import COMPLETION, PROMPT, score
from examples.demo.story import StoryError
from examples.demo.terminal import Terminal
from examples.demo.train import train, windows
from examples.promotion.kernel import VERSIONS, load_model, sampler
from examples.promotion.proxy import Deployed, Proxy
from kc_otel import Kernel, load_contract
from kc_otel.client.router import Router
from kc_otel.client.webhooks import new_secret
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording

CONTRACT = Path(__file__).with_name("contract.yaml")
STEPS = 100
RECORDED = 64
"""Sequences of each slice in a recording for the offline gate."""
PATIENCE = 300.0
"""Seconds until something that should happen counts as not happening."""
TRAIN = Kernel("torch", version=torch.__version__, dtype="float32")

Promotion = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.promotion", description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, help="keep the trained model in this file, or take it from there")
    parser.add_argument("--keep", type=Path, help="folder for the evidence; else it is gone at the end")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    terminal = Terminal()
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kc-otel-promotion-")))
            weights = options.weights or folder / "weights.pt"
            Life(terminal, folder, options.keep or folder / "evidence", weights, stack).tell()
    except (StoryError, RuntimeError, httpx.HTTPError) as error:
        terminal.say(f"FAILED: {error}", "bold red")
        return 1
    return 0


class Life:
    """The story. Each act waits for what the evaluator says, and ends the story when it does not come."""

    def __init__(self, terminal: Terminal, folder: Path, evidence: Path, weights: Path, stack: ExitStack) -> None:
        self.terminal, self.folder, self.evidence, self.weights, self.stack = terminal, folder, evidence, weights, stack
        self.contract = load_contract(CONTRACT)
        self.corpus: dict[str, Text] = load_corpus()
        self.model: Model
        self.proxy: Proxy
        self.url = ""

    def tell(self) -> None:
        """All acts."""
        self.terminal.heading("1. A model, and a kernel that serves it well: bf16")
        self._train()
        self.terminal.heading("2. CI: int8 is to come next, but its scales were calibrated on code and prose only")
        self._refused_by_the_gate()
        self.terminal.heading("3. A person forces it through: the launch is on Friday")
        self._deployment()
        self._forced_by_a_person()
        self.terminal.heading("4. The canary catches it on one slice, and it is taken back")
        self._caught_by_the_canary()
        self.terminal.heading("5. The evidence")
        self._evidence_of("int8")
        self.terminal.heading("6. Mended: calibrated on every slice. Gate, shadow, canary, a person's approval, full")
        self._the_mended_version()
        self._evidence_of("int8-mended")
        self.terminal.heading("What happened")
        self.terminal.timeline()

    def _train(self) -> None:
        if not self.weights.exists():
            torch.save(train(self.corpus, STEPS).state_dict(), self.weights)
            self.terminal.say(f"trained for {STEPS} steps")
        self.model = load_model(self.weights)
        torch.set_num_threads(1)
        self._gate("bf16", expected=0)
        self.terminal.moment(
            f"bf16 ({version_of('bf16')}) passes the offline gate; it is what serves from now on", "green"
        )

    def _refused_by_the_gate(self) -> None:
        said = self._gate("int8", expected=1)
        self.terminal.moment(f"the gate rejects int8 ({version_of('int8')}): exit code 1", "bold red")
        for line in said.splitlines():
            if line.startswith(("rollback", "  FAIL")):
                self.terminal.detail(line.strip())

    def _deployment(self) -> None:
        evaluator = self.stack.enter_context(evaluating(CONTRACT, self.folder, "http://127.0.0.1:9/", new_secret()))
        self.url = evaluator.api
        self.terminal.say(f"$ {' '.join(evaluator.command)}")
        export_to(evaluator.otlp)
        stable = self._running("bf16")
        router = self.stack.enter_context(Router(evaluator.api, contracts=[self.contract], refresh=0.2, wait=2.0))
        if not router.wait_for_table(10.0):
            raise StoryError("the router has no decision table")
        self.proxy = Proxy(self.contract, self.model, TRAIN, router, stable)
        self.stack.callback(self.proxy.close)

    def _forced_by_a_person(self) -> None:
        name = version_of("int8")
        code, said = self._cli("promote", self.contract.name, name, "--evidence", str(self.folder / "int8"))
        if code != 2:
            raise StoryError(f"the evaluator took the refused version in: {said}")
        self.terminal.moment("the evaluator does not admit it on that evidence either", "bold red")
        why = "the launch is on Friday, and the tables are 1% of it"
        code, said = self._cli("promote", self.contract.name, name, "--force", "canary", "--by", "ada", "--why", why)
        if code != 0:
            raise StoryError(f"the version could not be forced: {said}")
        self.terminal.moment(f"ada forces int8 into the canary, and her reason is kept: {why}", "bold yellow")
        self.proxy.deploy(self.stack.enter_context(self._process("int8")))

    def _served_in_a_row(self, version: str, share: float) -> bool:
        """Whether of hundreds of requests in a row a version served all (1) or none (0).

        Those on their way when a route changes go on to where they went.
        """
        if self._share_of(version) != share:
            self.proxy.served.clear()
        return self.proxy.served.total() > 300

    def _caught_by_the_canary(self) -> None:
        forced = time.monotonic()
        self._traffic(lambda: self._where("int8")["status"] == "rolled-back", "the canary did not catch it")
        seconds = time.monotonic() - forced
        share = self._share_of("int8")
        self.terminal.moment(
            f"rolled back after {seconds:.0f} s, in which int8 had served {share:.0%} of the requests", "red"
        )
        self.terminal.detail(self._where("int8")["reason"])
        failed = {verdict["slice"] for verdict in self._verdicts("int8") if verdict["status"] == "FAIL"}
        if not failed <= {"tables", "all"} or "tables" not in failed:
            raise StoryError(f"it failed on {sorted(failed)}, not on tables")
        self.proxy.served.clear()
        self._traffic(lambda: self._served_in_a_row("int8", 0.0), "int8 still serves requests")
        self.terminal.moment(f"{self.proxy.served.total()} requests later: bf16 serves all of them", "bold green")

    def _the_mended_version(self) -> None:
        name = version_of("int8-mended")
        self._gate("int8-mended", expected=0)
        self.terminal.moment(f"the gate advances int8-mended ({name}): exit code 0", "green")
        self._cli("promote", self.contract.name, name, "--evidence", str(self.folder / "int8-mended"))
        self.proxy.deploy(self.stack.enter_context(self._process("int8-mended")))
        self.proxy.mirrored = 0
        self._traffic(lambda: self._where("int8-mended")["stage"] == "canary", "shadow did not pass")
        self.terminal.moment(
            f"shadow: {self.proxy.mirrored} mirrored requests, scored by both kernels; no user got their answers",
            "cyan",
        )
        self.proxy.served.clear()
        asked = f"--approve {self.contract.promotion.approve[0]}"
        self._traffic(
            lambda: any(asked in reason for reason in self._where("int8-mended")["missing"]), "the canary did not pass"
        )
        self.terminal.moment(
            f"canary: int8-mended has served {self._share_of('int8-mended'):.0%} of {self.proxy.served.total()} "
            f"requests; its gate is open, and a person is asked", "cyan",
        )  # fmt: skip
        self._cli("promote", self.contract.name, name, "--approve", "full", "--by", "ada")
        self._traffic(lambda: self._where("int8-mended")["stage"] == "full", "it did not become full")
        self._traffic(lambda: self._served_in_a_row("int8-mended", 1.0), "it does not serve everything")
        self.terminal.moment("full: int8-mended serves every request", "bold green")

    def _evidence_of(self, version: str) -> None:
        folder = self.evidence / version
        self._cli("promote", self.contract.name, version_of(version), "--save", str(folder))
        files = sorted(folder.glob("*.json"))
        for file in files:
            code, said = self._cli("gate", "verify", str(file))
            if code:
                raise StoryError(f"evidence does not verify: {said}")
        self.terminal.moment(f"{len(files)} records of {version}'s steps, each verified by kc-otel gate verify", "bold")

    def _gate(self, version: str, *, expected: int) -> str:
        """The offline gate on a recording of a version; its evidence goes to a folder of the version's name."""
        file = self.folder / f"{version}.npz"
        save_recording(self._recorded(version), file)
        plain = VERSIONS[version].to_plain()  # the contract declares the rest
        code, said = self._cli(
            *("gate", "run", os.path.relpath(CONTRACT), str(file), "--evidence", str(self.folder / version)),
            *("--kernel", f"train.version={torch.__version__}"),
            *(f"--kernel=inference.{name}={plain[name]}" for name in ("version", "quantization") if name in plain),
            quiet=True,
        )
        if code != expected:
            raise StoryError(f"the gate of {version} ended with {code}: {said}")
        return said

    def _recorded(self, version: str) -> Recording:
        """Sequences of every slice, sampled by a version, with both kernels' log-probabilities."""
        tasks = [task for task in SLICES for _ in range(RECORDED)]
        prompts = windows([self.corpus[task].held_out for task in tasks], PROMPT)
        ids, logprobs = sampler(version, self.model, self.corpus).generate(prompts, COMPLETION)
        scored = score(self.model, prompts, ids)
        lengths = torch.full((len(tasks),), COMPLETION).numpy()
        sides = (side.double().reshape(-1).numpy() for side in (scored, logprobs))
        return Recording(*sides, lengths, tuple({"task": task} for task in tasks))

    def _traffic(self, until: Callable[[], bool], otherwise: str) -> None:
        """Serve requests until something holds."""
        began = looked = time.monotonic()
        while True:
            self.proxy.serve(self.corpus)
            if time.monotonic() - looked >= 0.5:
                looked = time.monotonic()
                if until():
                    return
            if time.monotonic() - began > PATIENCE:
                raise StoryError(f"{otherwise} (waited {PATIENCE:.0f} s)")

    def _share_of(self, version: str) -> float:
        served = sum(count for (name, _), count in self.proxy.served.items() if name == version_of(version))
        return served / max(1, self.proxy.served.total())

    def _where(self, version: str) -> Promotion:
        return self._get(f"/api/v1/promotions/{self.contract.name}/{version_of(version)}")

    def _verdicts(self, version: str) -> list[dict[str, Any]]:
        found = self._get("/api/v1/verdicts")["verdicts"]
        return [row for row in found if row["kernel_inference"] == version_of(version)]

    def _get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=10.0, trust_env=False).raise_for_status().json()

    def _running(self, version: str) -> Deployed:
        return self.stack.enter_context(self._process(version))

    @contextmanager
    def _process(self, version: str) -> Iterator[Deployed]:
        """A version of the kernel in a process of its own, until the block ends."""
        command = [sys.executable, "-m", "examples.promotion.kernel", str(self.weights), version]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own
            try:
                assert process.stdout is not None
                port = process.stdout.readline().strip()
                if not port:
                    raise RuntimeError(f"the kernel {version} did not start")
                yield Deployed(VERSIONS[version], f"http://127.0.0.1:{port}")
            finally:
                process.terminate()

    def _cli(self, *arguments: str, quiet: bool = False) -> tuple[int, str]:
        """Exit code and output of a `kc-otel` command, in a process of its own."""
        shown = " ".join(f"'{argument}'" if " " in argument else argument for argument in arguments)
        self.terminal.say(f"$ kc-otel {shown}".replace(str(self.folder), "."), "dim")
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-m", "kc_otel", *arguments],
            env={**os.environ, "KC_OTEL_URL": self.url or "http://127.0.0.1:9", "GITHUB_STEP_SUMMARY": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        said = (done.stdout + done.stderr).replace(str(self.folder), ".").replace(self.url or "\0", "")
        if not quiet:
            for line in said.splitlines():
                self.terminal.detail(line)
        return done.returncode, said


def version_of(name: str) -> str:
    """Short fingerprint of a version."""
    return VERSIONS[name].fingerprint


if __name__ == "__main__":
    sys.exit(main())
