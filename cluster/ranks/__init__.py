"""The line between the ranks of one worker."""
