"""Anthropic's Messages API: a reader and a writer over what answers chat completions."""
