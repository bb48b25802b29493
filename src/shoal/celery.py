"""The Celery app for Celery's own commands: ``celery -A shoal.celery worker``, ``celery -A shoal.celery flower``."""

from shoal.api.celery.app import app as app

__all__ = ["app"]
