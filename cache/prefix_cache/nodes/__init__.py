"""Nodes of the prefix tree, their parts, components and locks."""
