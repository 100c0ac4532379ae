"""A policy of continuous actions in two precisions, measured by its log-densities, with the truth beside it."""
