"""Drift from two kernels' tensors, in NumPy and torch, without a clock, a thread or a file.

`sampled` has every quantity of a sampled token and of a sequence, `logits` those of whole distributions, `checks` and
`processing` what has to hold before a difference is drift. A new metric begins in one of the first two, or in
`record.operator_drift`, under its key of `kc_otel.contract.registry`; `record.telemetry.reduce` sums those of tokens.
"""
