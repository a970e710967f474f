"""What a folder of weights says, read without torch."""
