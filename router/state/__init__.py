"""Which workers there are, and which requests are under way."""
