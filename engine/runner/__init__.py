"""One step: batch, forward pass, draw."""
