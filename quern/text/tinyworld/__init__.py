"""The built-in world: documents, conversations and held-out questions, generated from a seed.

It makes quern usable offline. Facts are constant; the seed decides which stories are told.
"""
