"""The layers that models are built of."""
