"""The command line: verbs, their options, their help, and how errors and Ctrl-C end a command.

The top of the package: it imports every other room and none imports it. `quern = quern.cli.main:main`.
"""
