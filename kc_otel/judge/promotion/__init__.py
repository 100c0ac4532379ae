"""Offline CI, shadow, canary, full: gates and their evidence."""
