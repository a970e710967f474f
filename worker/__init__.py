"""What both roles' workers do alike."""
