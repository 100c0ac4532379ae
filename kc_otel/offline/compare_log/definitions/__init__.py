"""What other tools call training-inference mismatch, computed as each of them computes it, under its own names.

Two dashboards that both say "KL" may differ because one averages over tokens and the other over sequences, because one
clamps, or because one prints a ratio after it was clipped. These functions are for laying such numbers beside each
other on one recording; what a contract limits is defined in `kc_otel.record.measure.sampled`.

Every function is NumPy in float64. The tools themselves compute in float32, so their numbers agree with these to about
six digits. A 1e-8 that a tool adds to a count of tokens vanishes in float32 and is left out here.
"""

from kc_otel.offline.compare_log.definitions import llama_cpp, nemo_rl, prime_rl, trl, verl

__all__ = ["llama_cpp", "nemo_rl", "prime_rl", "trl", "verl"]
