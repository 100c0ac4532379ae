"""GRPO in TRL with a vLLM sampler, a weight synchronisation that is skipped, and the contract that notices."""
