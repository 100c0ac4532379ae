"""The offline stage of a promotion in a CI job: two kernels, a recording of each, and the workflow to copy."""
