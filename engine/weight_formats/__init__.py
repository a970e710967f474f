"""Weights as checkpoints store them: their layouts, and the one form in which products take them."""
