"""State of the engines outside the process: snapshots on a changelog topic."""
