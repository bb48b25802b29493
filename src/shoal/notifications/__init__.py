"""Notifications: who is told of which problem, through which channel."""
