"""`shoal celery-worker`: work on the batches that the API sends to Celery."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.help import Commands
from shoal.cli.options import given, resolve
from shoal.errors import ConfigError
from shoal.suggestions import pip_install

app = Commands()


@app.add(
    "celery-worker",
    examples="""
    shoal celery-worker
    CELERY_BROKER_URL=redis://host/1 shoal celery-worker --concurrency 8
    """,
)
def celery_worker(
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", metavar="N", min=1,
            help="Fetch up to N pages at the same time (default: CELERY_WORKER_CONCURRENCY, or 2).",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="The worker's name in results (default: celery). @HOST is appended to it."
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option("--log-level", metavar="LEVEL", help="DEBUG, INFO (default), WARNING or ERROR."),
    ] = None,
) -> None:  # fmt: skip
    """Work on the batches that the API sends to Celery.

    SIGTERM or Ctrl-C stops the worker after it has finished its current pages. This is the same as `celery -A
    shoal.celery worker`. Set the broker and the limits in the environment: CELERY_BROKER_URL, CELERY_RESULT_BACKEND,
    CELERY_TASK_RATE_LIMIT, CELERY_TASK_MAX_RETRIES, CELERY_WORKER_CONCURRENCY.
    """
    level = None if log_level is None else log_level.upper()
    # Check the settings here: otherwise each child process fails on them and is restarted, without end.
    config = resolve(None, given({"log_level": level}), []).config
    config.refuse_tor("a Celery worker")
    try:
        from shoal.tasks.app import app as celery
    except ModuleNotFoundError as exc:
        raise ConfigError(f"`shoal celery-worker` needs {exc.name}; install it with: {pip_install('celery')}") from exc
    words = ["worker", f"--loglevel={config.log_level}"]
    if concurrency is not None:
        words.append(f"--concurrency={concurrency}")
    if name is not None:
        words.append(f"--hostname={name if '@' in name else f'{name}@%h'}")
    celery.worker_main(words)
