"""Chromium: its processes, its pages, and the way out of it."""
