"""The run of a scenario: faults, checks and the command."""
