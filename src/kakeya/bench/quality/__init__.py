"""`kakeya bench quality`: what arithmetic costs, and what bounded memory costs."""
