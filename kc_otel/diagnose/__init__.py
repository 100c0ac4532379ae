"""After a FAIL: which operator it is, and what part of the drift is its."""
