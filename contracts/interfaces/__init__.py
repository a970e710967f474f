"""The worker as it is driven, and as it is reached."""
