"""The copies between device, host and storage, and the KV events that report them."""
