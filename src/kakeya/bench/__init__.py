"""Measurements of the runtime, and the reports they leave behind."""
