"""Chat completions: the stateless shim, over sessions that are held for the next request."""
