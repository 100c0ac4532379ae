"""Operators of two kernels on the same inputs, judged by a contract that names them."""
