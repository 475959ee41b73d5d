"""Mixtures of conversations for fine-tuning: sources by name, rows of question sets as conversations, token shards.

Files are opened and converted by text/; the recipe names the sources (`ConversationSource`). Test rows of tasks are
refused here, before anything is trained on.
"""
