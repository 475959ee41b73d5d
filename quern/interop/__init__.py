"""Models of other programs: import from and export to the Hugging Face format, export to GGUF.

Each format has one table that maps names and shapes. Weights keep their values, up to rounding to the chosen dtype; in
GGUF the rows of the query and key projections have another order.
"""
