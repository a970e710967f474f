"""OpenAI's API: requests read and checked, answers written."""
