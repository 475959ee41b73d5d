"""Steps that remove documents, for `make_documents` of a recipe, and the runs of words that find benchmark questions.

experiments/clean_text.py is an example.
"""
