"""The wire contract as Python: generated from proto/kakeya/v1 by `make proto`, and nothing else."""
