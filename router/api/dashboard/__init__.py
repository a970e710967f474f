"""The pages that a router shows in a browser: the dashboard's files, and what is at its root."""
