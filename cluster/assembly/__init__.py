"""Building a worker from its parts, and planning how much memory and how many threads each worker gets."""
