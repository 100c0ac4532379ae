"""After a FAIL: which operator it is, and what part of the drift is its.

`boundaries`, `above_noise`, `shares` and `located` are pure; files whose names begin with `torch_` run a model, those
with `vllm_` run an engine, and those that read files say so.
"""
