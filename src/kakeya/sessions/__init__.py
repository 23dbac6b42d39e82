"""Sessions, the store that keeps them, and what owners may use."""
