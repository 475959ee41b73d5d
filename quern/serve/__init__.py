"""The HTTP server: an OpenAI-compatible API and the chat page in web/.

A thin layer over generate/. It needs the packages of the `serve` extra.
"""
