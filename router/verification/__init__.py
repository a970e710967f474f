"""Audits, and streams that look broken."""
