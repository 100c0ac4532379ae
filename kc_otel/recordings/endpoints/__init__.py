"""Two live endpoints: one samples, the other scores exactly the same tokens, and both are a recording afterwards."""
