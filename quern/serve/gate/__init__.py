"""The gate between the network and the application: connections, host names, keys, rates."""
