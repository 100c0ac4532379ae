"""Contracts: the permitted differences between two kernels of one policy, and the actions on a breach."""
