"""The HTTP server: an OpenAI-compatible API and the chat page in web/.

Thin around generate/; it needs the serve extra.
"""
