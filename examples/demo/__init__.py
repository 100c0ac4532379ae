"""The whole of kc-otel on two real kernels of one small language model: `python -m examples.demo`."""
