"""Effect of each correction of the rollout mismatch on a recording, and the correction that meets a contract."""
