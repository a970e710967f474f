"""Structured output: the tokens that a grammar lets an answer go on with, as bit masks."""
