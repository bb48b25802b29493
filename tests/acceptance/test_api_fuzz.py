"""No request makes the server fail, whether the OpenAPI description allows it or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

# There is no Redis: a batch for Celery is answered by a 503, which says so. Nothing else may be one.
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503]
"""

# A network of their own with a loopback and nothing else: what the server is told to crawl leads nowhere, and no
# look-up of a name gets out. The server stops with the shell.
_SCRIPT = r"""
ip link set lo up
"$1" -m shoal.cli.main serve --port 8000 > server.log 2>&1 &
trap "kill $!" EXIT
for _ in $(seq 100); do
  "$1" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')" 2> /dev/null && break
  sleep 0.1
done
"$2" --config-file schemathesis.toml run http://127.0.0.1:8000/openapi.json --checks "$3" --max-examples "$4" \
  --phases examples,coverage,fuzzing,stateful --generation-deterministic --request-timeout 10 --no-color \
  --continue-on-failure || status=$?
"$1" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')" || status=99
exit ${status:-0}
"""


@pytest.mark.timeout(300)
def test_schemathesis(tmp_path: Path, thorough: bool) -> None:
    apart = ["unshare", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        why = "only root may have a network of its own"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    (tmp_path / "shoal.toml").write_text('[serve]\nmax_sessions = 100\n[spiders.Books]\nfile = "books.py"\n')
    (tmp_path / "books.py").write_text("from shoal import Spider\n\n\nclass Books(Spider):\n    name = 'books'\n")
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    schemathesis = str(Path(sys.executable).with_name("schemathesis"))
    command = [*apart, "sh", "-uc", _SCRIPT, "sh", sys.executable, schemathesis, CHECKS, "15" if thorough else "5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=290, check=False)
    log = (tmp_path / "server.log").read_text()
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}\n{log[-3000:]}"
    assert "Traceback" not in log
