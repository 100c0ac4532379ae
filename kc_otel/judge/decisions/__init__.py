"""The decision table, and the client that reads it in the serving process."""
