"""Documents, tokenizer, chat rendering and data sets: from files to texts and token ids.

NumPy and pyarrow only, no tensor library. The built-in corpus is in tinyworld/.
"""
