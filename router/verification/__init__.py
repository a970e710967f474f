"""The verification of answers: audits, the stream watch, and totals of damage."""
