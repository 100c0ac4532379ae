"""True policy-gradient bias against every bound, by enumeration: `python -m examples.rl_bias`."""
