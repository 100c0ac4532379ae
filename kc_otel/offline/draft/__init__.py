"""A contract from a reward budget: clauses, limits and how each follows, as commented YAML."""
