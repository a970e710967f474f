"""Step graphs: forward passes of decode steps, captured once by size and replayed by one launch."""
