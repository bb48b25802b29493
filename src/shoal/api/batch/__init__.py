"""Batches: URLs in, content out. A batch is a run whose items are its results, on this machine or on Celery workers."""
