"""Measures of ideas: n-gram models that a proxy must beat, and the speed of an arm.

A study's plan, records and verdicts belong in `lab/`.
"""
