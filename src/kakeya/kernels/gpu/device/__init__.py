"""Triton's programs. Importing one of these modules imports Triton."""
