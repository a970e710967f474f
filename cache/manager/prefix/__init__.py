"""Prefixes of requests: allocated from the tiers, shared with the tree, handed over, pushed and pulled."""
