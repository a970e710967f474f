"""The model runner: a step from its batch over the forward pass to drawn tokens."""
