"""Models of other programs: import from and export to the Hugging Face format, export to GGUF.

Each format has one table that maps names and shapes; weights pass through unchanged.
"""
