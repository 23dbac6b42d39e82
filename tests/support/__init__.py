"""What several test files share: tiny real checkpoints and the oracle."""
