"""The router's state: the workers, and the requests under way."""
