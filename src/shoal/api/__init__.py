"""Shoal over HTTP: batches of URLs, the API of runs, and the dashboard.

`server` is the application with its doors and limits, `resources` has one module for each kind of route, `batch` does
what batches need, `celery` lets Celery workers do it, `dashboard` is for people. This room may import `operations`
and what is below it. Start with `server.app`.
"""
