"""The channel between the ranks of one worker: leader and followers."""
