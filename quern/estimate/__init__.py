"""Time, memory and traffic of a training run, before it starts: `quern lab plan`, the refusal of a run that does not
fit, and the law of a text of one's own.

It measures nothing except the matrix products of this machine.
"""
