"""Process ids, the files of a run, the reaper, when to start again."""
