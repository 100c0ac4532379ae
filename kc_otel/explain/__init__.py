"""What a contract's limits promise: forwards to reward and gradient, backwards from a budget, and among each other."""

from kc_otel.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
