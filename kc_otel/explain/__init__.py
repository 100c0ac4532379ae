"""What a contract promises and what it costs to promise it: the chain of bounds forwards and backwards."""
