"""Host memory that outlives its worker."""
