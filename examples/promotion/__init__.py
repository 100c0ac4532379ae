"""The life of a bad kernel version, and of the one that mends it: `python -m examples.promotion`."""

import os

# Several processes share few cores here; threads of torch that spin while they wait would take them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
