"""A retracted request's state off the device and back."""
