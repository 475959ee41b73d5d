"""CORE: 22 few-shot tasks for base models, scored by likelihood and averaged.

Its tables, its prompts, the batched scorer, and the run over all tasks.
"""
