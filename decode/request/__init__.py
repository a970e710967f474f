"""One request on decode."""
