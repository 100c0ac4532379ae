"""What each correction of the rollout mismatch would have done to a recording, and which one meets a contract."""
