"""Parsers of answers: what of a chat's text is reasoning, what is content, and what calls a tool."""
