"""Who holds which blocks, by KV events."""
