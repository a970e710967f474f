"""Planes `local`, `shm` and `cuda_ipc`: stores straight into memory of the reader that is mapped here."""
