"""What outlives the process: a directory with a database of sessions and files with their keys and values."""
