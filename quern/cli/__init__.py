"""The command line: verbs, options, help, errors and Ctrl-C. Entry point: `quern = quern.cli.main:main`.

It imports every other package of quern, and none imports it.
"""
