"""Configuration of who may ask: API keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may ask the endpoint, and what it is open to."""

    keys_file: str = ""
    """File of API keys, made by `twinpool keys`; requests for text need one of them. Empty: nobody needs a key."""
    open: bool = False
    """Whether an endpoint that other machines reach may do without keys."""
