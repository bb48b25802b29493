"""A server of S3: moto, which obeys the conditions of writes. `need_tools moto` installs it into `.venv-moto`, whose
Python runs this file: `python tests/support/s3_server.py PORT JOURNAL [ignore]`. With `ignore` it ignores these
conditions, as some servers do. moto keeps objects in memory: the journal has all requests that change something,
for the next process."""

import io
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.test import run_wsgi_app

_USER = "Credential=shoal/"
_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


class OneAtATime:
    """Handles a request when it is there completely, and one after the other: moto checks a condition, then writes."""

    def __init__(self, application: Any, journal: Path, *, ignores_conditions: bool) -> None:
        self._application = application
        self._ignored = _CONDITIONS if ignores_conditions else ()
        self._lock = Lock()
        self._replay(journal)
        self._journal = journal.open("ab", buffering=0)

    def _replay(self, journal: Path) -> None:
        if not journal.exists():
            return
        with journal.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):  # killed during the last record
            while True:
                environ, body = pickle.load(file)
                stream = {"wsgi.input": io.BytesIO(body), "wsgi.errors": sys.stderr, "wsgi.url_scheme": "http"}
                run_wsgi_app(self._application, environ | stream, buffered=True)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if len(body) < length:  # the client died. S3 writes an object as a whole or not at all
            start_response("400 Bad Request", [])
            return []
        if "Credential=" in environ.get("HTTP_AUTHORIZATION", "") and _USER not in environ["HTTP_AUTHORIZATION"]:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])  # moto accepts every key
            return [b"<Error><Code>InvalidAccessKeyId</Code><Message>There is no such key.</Message></Error>"]
        environ["wsgi.input"] = io.BytesIO(body)
        for name in self._ignored:
            environ.pop(name, None)
        with self._lock:
            if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
                texts = {name: value for name, value in environ.items() if isinstance(value, str)}
                self._journal.write(pickle.dumps((texts, body)))
            return list(self._application(environ, start_response))


if __name__ == "__main__":
    ignores_conditions = "ignore" in sys.argv
    application = OneAtATime(create_backend_app("s3"), Path(sys.argv[2]), ignores_conditions=ignores_conditions)
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)
