"""A frontier that one process of a machine owns and other processes use, over a Unix socket. No server is needed."""
