"""A scenario, run and judged."""
