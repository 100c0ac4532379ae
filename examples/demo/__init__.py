"""The whole of kc-otel on two real kernels of one small language model: `python -m examples.demo`."""

import os

# torch's threads spin while they wait, and here they share two cores with the evaluator: on a busy machine that costs
# a factor of four. It is read when torch is loaded, so it is set before anything in this package loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
