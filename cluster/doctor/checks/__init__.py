"""The doctor's checks, a file for each thing that they look at. A check reads, and changes nothing that stays."""
