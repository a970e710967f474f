"""Measurements and the recipes behind what they measure."""
