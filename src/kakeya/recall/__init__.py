"""Which pages of a session's past a turn should see again: words in, ranges out. No model, no device."""
