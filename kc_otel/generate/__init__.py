"""Dashboards, alerts and rules made from contracts."""
