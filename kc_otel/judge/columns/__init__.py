"""Messages as columns, and what is known of streams in arrays: the quick way, with loops in C."""
