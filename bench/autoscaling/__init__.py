"""The autoscaler on real workers: pools that follow their load, beside fixed sizes."""
