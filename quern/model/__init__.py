"""The architectures: GPT, U-net and Llama as single-device modules, and what they share.

No process groups and no files; a context that is handed in says how attention sees other tokens.
"""
