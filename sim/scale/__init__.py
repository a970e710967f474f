"""The fast simulator: real decisions, workers as models whose steps between two events are one jump."""
