"""Served requests on disk, between the process that serves them and the one that scores them again."""
