"""What a run would take on given hardware: time, memory and traffic, before it starts (`quern lab plan`).

A leaf: only the command line imports it. It measures nothing but this machine's matrix products.
"""
