"""The Python files of an exported `gpt` or `unet`: `quern export` copies them beside the weights, word for word.

They import torch and transformers only, so that they work where quern is not installed. quern never imports them.
"""
