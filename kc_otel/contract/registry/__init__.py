"""The one registry of names: every quantity, metric and attribute that kc-otel measures, sends or stores.

A contract is refused against it, the recorder names its histograms by it, and dashboards, alerts and documentation
are checked against it. It lives beside the contract model because a contract's clauses are the first thing that
names a quantity; every other box may import it.
"""
