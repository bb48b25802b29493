"""`shoal celery-worker`: works on the batches that the API gives to Celery."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.running import given, resolve
from shoal.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command("celery-worker")(celery_worker)


def celery_worker(
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", metavar="N", min=1, help="Pages at a time (default: CELERY_WORKER_CONCURRENCY, or 2)."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="What its results call it (default: celery); @ and the host are added to it."
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="The least that is logged (default INFO).")
    ] = None,
) -> None:
    """Work on distributed batches, until SIGTERM or Ctrl-C: then what is in work is finished first.

    The same as `celery -A shoal.celery worker`. The broker and the pace come from the environment: CELERY_BROKER_URL,
    CELERY_RESULT_BACKEND, CELERY_TASK_RATE_LIMIT, CELERY_TASK_MAX_RETRIES, CELERY_WORKER_CONCURRENCY.
    """
    level = None if log_level is None else log_level.upper()
    # What is wrong with the settings is told here: its processes would each find it, and be started again for ever.
    config = resolve(None, given({"log_level": level}), []).config
    try:
        from shoal.tasks.app import app
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"`shoal celery-worker` needs {exc.name}; install it with: pip install 'shoal[celery]'"
        ) from exc
    words = ["worker", f"--loglevel={config.log_level}"]
    if concurrency is not None:
        words.append(f"--concurrency={concurrency}")
    if name is not None:
        words.append(f"--hostname={name if '@' in name else f'{name}@%h'}")
    app.worker_main(words)
