"""Who may send, read and act, and on which contracts."""
