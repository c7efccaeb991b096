"""Parts of the container image."""
