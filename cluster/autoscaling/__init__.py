"""The rules by which pools get more or fewer workers; pure, without a table, a clock or I/O."""
