"""GRPO in TRL with a vLLM sampler, weights that stop arriving, and the contract that notices and acts."""
