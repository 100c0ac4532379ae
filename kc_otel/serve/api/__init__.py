"""The HTTP API: a file of routes for each subject, and the shapes of what they answer."""
