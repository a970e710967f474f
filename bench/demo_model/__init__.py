"""The demo checkpoint: corpus, tokenizer, model and training."""
