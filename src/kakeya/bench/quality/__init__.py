"""`kakeya bench quality`: what arithmetic costs, what bounded memory costs, and what it keeps."""
