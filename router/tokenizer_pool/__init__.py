"""The reader processes, which parse, check and tokenise large bodies."""
