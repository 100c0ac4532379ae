"""Files of the page at `/`."""
