"""Incidents: cells that broke together, since when, for whom, and the actions taken."""
