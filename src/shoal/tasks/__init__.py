"""Batches on Celery: a lease goes out as a task, and whoever gets the task works on it."""
