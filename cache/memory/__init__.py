"""The state of a model: what it consists of, how it lies in memory, and how it is copied and digested."""
