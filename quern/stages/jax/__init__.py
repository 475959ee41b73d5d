"""The stages of the JAX twin: `quern grug train`, `eval`, `export` and `import`.

They read the same recipes, shards and run folders as the PyTorch stages.
"""
