"""The gate between the network and the application: connections, host names, keys, rates."""

from __future__ import annotations
