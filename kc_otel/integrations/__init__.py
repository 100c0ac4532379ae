"""Engines and trainers, each in a file or folder of its own that imports its library inside."""
