"""A worker from its parts, and how much memory each gets."""
