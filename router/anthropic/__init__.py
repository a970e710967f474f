"""Anthropic's Messages API, as a translation of chats."""
