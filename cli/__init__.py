"""The `twinpool` command."""
