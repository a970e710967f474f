"""JSON schemas of clients, written again in the keywords that the grammar engine follows."""
