"""Incidents: what broke together, since when, for whom, and what was done about it."""
