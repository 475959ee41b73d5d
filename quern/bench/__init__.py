"""Speed on this machine: what `quern bench` measures, one file for each subject, and the records it writes.

A leaf: only the command line imports it. Timings are taken in alternation and reported with their spread; kernels that
only a GPU runs are measured in gpu/.
"""
