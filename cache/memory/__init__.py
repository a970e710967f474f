"""What a model keeps, how it lies in memory, and how it is copied and digested."""
