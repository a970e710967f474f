"""OpenAI requests in, OpenAI answers out."""
