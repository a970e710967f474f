"""Indexes of the blocks that workers hold: from what the router sent them, and from their KV events."""
