"""OpenAI's Responses API, as a translation of chats; nothing is stored."""
