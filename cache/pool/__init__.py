"""Who owns which page: pools, leases, epochs, gates."""
