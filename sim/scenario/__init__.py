"""What a seed stands for."""
