"""Proposers: what guesses the next tokens of a session, so that the verifier can compute several at once."""
