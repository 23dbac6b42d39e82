"""Chat completions and completions: stateless APIs over sessions."""
