"""Plain completions: text and tokens continued, and scored."""
