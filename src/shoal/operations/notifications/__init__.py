"""Notifications: which problems are sent to whom, through which channel."""
