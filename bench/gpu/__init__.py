"""What is measured on a GPU: `python -m bench.gpu`."""
