"""Schedules: spiders that run at set times. Any number of servers on one store start each run exactly once."""
