"""Retraction: which requests leave the device when pages are short, and how they come back."""
