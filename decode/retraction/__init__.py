"""Short of pages: who leaves the device, and how it comes back."""
