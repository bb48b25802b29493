"""Schedules: spiders that run at set times. Several servers on one store start each run exactly once."""
