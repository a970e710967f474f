"""What an attention backend is given and must answer."""
