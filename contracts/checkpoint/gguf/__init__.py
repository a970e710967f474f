"""Reading a GGUF file as a checkpoint: its configuration, tensors, tokenizer and chat template, without torch."""
