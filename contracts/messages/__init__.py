"""What processes say to each other, one file an edge."""
