"""A reinforcement learning loop in plain torch whose sampler is quantised, and what its contract says."""
