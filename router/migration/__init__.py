"""Migrations and pushed prefixes, as the router drives them."""
