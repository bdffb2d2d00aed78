"""Tuning: what is measured, with what, where it is kept, and what is chosen by it."""
