"""The promise: what two kernels of one policy may differ by, and what happens when they do."""
