"""Benchmarks on a machine without a login: `kakeya bridge serve` there, `kakeya bridge run` here."""
