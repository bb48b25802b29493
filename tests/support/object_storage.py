"""Servers of object storage in their own processes: moto (S3) and Azurite. Both obey the conditions of writes.
`need_tools moto` and `need_node_servers` install them."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
import os
import urllib.request
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import obstore
import pytest
from obstore.store import AzureStore, ObjectStore, S3Store

from tests.support.databases import DatabaseServer, listens

_ROOT = Path(__file__).parents[2]
_AZURE_KEY = base64.b64encode(b"the key of the tests, which is not a secret").decode()
_ALL_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")


class ObjectServer(DatabaseServer):
    """A server of object storage. ``bucket`` makes a new bucket."""

    scheme: ClassVar[str]
    program: ClassVar[str]
    root: ClassVar[str] = ""
    """With which the paths of its URLs begin."""
    listing: ClassVar[bytes]
    """What the URL of a request for a list of objects has."""

    def _prepare(self) -> None:
        self._count = 0
        if not (_ROOT / self.program).exists():
            raise RuntimeError(f"{self.program} is not installed; run `scripts/test`, which installs it")

    def _answers(self) -> bool:
        return listens(self.port)

    @property
    def url(self) -> str:
        return f"{self.scheme}://"

    def endpoint_at(self, port: int) -> str:
        """The endpoint of this server behind a proxy on this port."""
        return f"http://127.0.0.1:{port}{self.root}"

    @property
    def endpoint(self) -> str:
        return self.endpoint_at(self.port)

    @property
    @abstractmethod
    def variables(self) -> Mapping[str, str]:
        """The environment of a process that uses this server."""

    @abstractmethod
    def store(self, bucket: str) -> ObjectStore:
        """A client of its own, for the tests."""

    @abstractmethod
    def _make(self, bucket: str) -> None: ...

    def bucket(self) -> str:
        """Make an empty bucket, and return its name."""
        self._count += 1
        name = f"bucket-{os.getpid()}-{self._count}"
        self._make(name)
        return name

    def objects(self, bucket: str) -> dict[str, bytes]:
        """The content of each object by its path, in the order of the paths. A crawl may remove one meanwhile: a part
        that it will write again."""
        store = self.store(bucket)
        found: dict[str, bytes] = {}
        for path in sorted(each["path"] for batch in obstore.list(store) for each in batch):
            with suppress(FileNotFoundError):
                found[path] = bytes(obstore.get(store, path).bytes())
        return found

    def parts(self, bucket: str) -> dict[str, bytes]:
        """The content of each part of an output by its path, in order, whether a manifest names it or not."""
        return {path: content for path, content in self.objects(bucket).items() if "/_manifest-" not in path}

    def manifest(self, bucket: str) -> dict[str, Any] | None:
        """The manifest of the only output in the bucket; None if there is none."""
        store = self.store(bucket)
        paths = [entry["path"] for batch in obstore.list(store) for entry in batch if "/_manifest-" in entry["path"]]
        return json.loads(bytes(obstore.get(store, paths[0]).bytes())) if paths else None

    def restore(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Set the bucket back to these objects."""
        store = self.store(bucket)
        for path in self.objects(bucket).keys() - objects.keys():
            obstore.delete(store, path)
        for path, content in objects.items():
            obstore.put(store, path, content)


class S3Server(ObjectServer):
    """moto. ``start`` after ``kill`` keeps its objects, which Azurite would lose."""

    scheme, program, listing = "s3", ".venv-moto/bin/python", b"list-type=2"
    options: ClassVar[tuple[str, ...]] = ()

    def _command(self) -> list[str]:
        journal = str(self.folder / "journal")
        return [
            str(_ROOT / self.program),
            str(_ROOT / "tests/support/s3_server.py"),
            str(self.port),
            journal,
            *self.options,
        ]

    @property
    def variables(self) -> Mapping[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "shoal", "AWS_SECRET_ACCESS_KEY": "shoal", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }  # fmt: skip

    def store(self, bucket: str) -> ObjectStore:
        return S3Store(
            bucket, endpoint=self.endpoint, access_key_id="shoal", secret_access_key="shoal", region="us-east-1",
            client_options={"allow_http": True},
        )  # fmt: skip

    def _make(self, bucket: str) -> None:
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")) as answer:
            assert answer.status == 200


class CarelessS3Server(S3Server):
    """It ignores the conditions of writes, as some servers do."""

    options = ("ignore",)


class AzureServer(ObjectServer):
    """Azurite. A kill loses the objects of the last seconds."""

    scheme, program = "az", ".node-servers/node_modules/azurite/dist/src/blob/main.js"
    root, listing = "/shoal", b"comp=list"

    def _command(self) -> list[str]:
        words = ["--location", str(self.folder), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        return ["env", f"AZURITE_ACCOUNTS=shoal:{_AZURE_KEY}", "node", str(_ROOT / self.program), *words, *flags]

    @property
    def variables(self) -> Mapping[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": "shoal", "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }  # fmt: skip

    def store(self, bucket: str) -> ObjectStore:
        options: Any = {"endpoint": self.endpoint, "account_name": "shoal", "account_key": _AZURE_KEY}
        return AzureStore(bucket, config=options, client_options={"allow_http": True})

    def _make(self, bucket: str) -> None:
        date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
        lines = [*(f"{name}:{value}" for name, value in headers.items()), f"/shoal/shoal/{bucket}", "restype:container"]
        text = "PUT" + "\n" * 12 + "\n".join(lines)
        signature = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey shoal:{base64.b64encode(signature).decode()}"
        url = f"{self.endpoint}/{bucket}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)) as answer:
            assert answer.status == 201


def use(server: ObjectServer, patch: pytest.MonkeyPatch) -> None:
    """Let this process use the server, and no other one."""
    for name in [name for name in os.environ if name.startswith(_ALL_VARIABLES)]:
        patch.delenv(name)
    for name, value in server.variables.items():
        patch.setenv(name, value)
