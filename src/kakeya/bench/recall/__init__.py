"""`kakeya bench recall`: what a session remembers of what has left its window, and what that costs."""
