"""The command line and the composition root; the only reader of the environment."""
