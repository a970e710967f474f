"""The arena: host memory that outlives its worker."""
