"""`quern lab plan`: time, memory and traffic of a training run on given hardware, before it starts.

Only the command line imports this folder. It measures nothing except the matrix products of this machine.
"""
