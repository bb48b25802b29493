"""Batches on Celery: each lease is sent as a task, and the worker that receives it fetches the page."""
