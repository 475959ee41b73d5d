"""quern grinds raw text into a language model you can talk to; docs/architecture.md maps the package.

Importing it does nothing but name the version: no device is chosen and no module is loaded.
"""

__version__ = "0.1.0"
