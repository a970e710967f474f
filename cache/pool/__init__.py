"""Pool sets: page allocators, leases, pins, epochs and load gates."""
