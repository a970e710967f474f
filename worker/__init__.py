"""The common part of prefill and decode workers: worker loop, request table, step overlap and reports."""
