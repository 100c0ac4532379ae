"""Access: tokens, and what their holders may do."""
