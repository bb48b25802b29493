"""Tests of the dashboard in Chromium, on a fleet that crawls."""
