"""Reading a checkpoint folder's `config.json` and tensor headers, without torch."""
