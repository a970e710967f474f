"""Process ids, the files of a run, the reaper, and the rule for restarts."""
