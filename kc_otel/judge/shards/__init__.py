"""One judge over several shards: what a shard tells, and how the judge takes it."""
