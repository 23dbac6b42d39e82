"""Makes what the runtime needs and nobody ships for it: drafters, trained by nothing but their verifier."""
