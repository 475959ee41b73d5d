"""`quern chat`: a conversation in the terminal or through a pipe, and its commands.

lines.py reads, commands.py has the table of commands, conversation.py asks the model, talk.py is the loop over all.
"""
