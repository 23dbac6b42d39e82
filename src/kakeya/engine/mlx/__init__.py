"""The MLX backend: Apple silicon, and MLX's CPU build elsewhere. Imported only when it was asked for."""
