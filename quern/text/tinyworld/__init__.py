"""The built-in world: documents, conversations and held-out questions, generated from a seed.

It makes quern usable offline. Words, facts and wordings are in the TOML files; the Python files contain the logic.
"""
