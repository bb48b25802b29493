"""A certificate authority, and a certificate for each address, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

EXTENSIONS = "subjectAltName=IP:{host}\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\n"


def certify(hosts: tuple[str, ...], folder: Path) -> Path:
    """Make the certificates unless they exist. Returns the certificate of the authority.

    `folder` gets `ca.pem`, `key.pem` (of all hosts) and HOST.pem.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, complete = folder / "ca.pem", folder / ".complete"
    if not complete.exists() or int(complete.read_text()) < len(hosts):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        usage = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "3650", "-subj",
                "/CN=bench CA", *usage)  # fmt: skip
        openssl(folder, "req", *key, "-keyout", "key.pem", "-out", "host.csr", "-subj", "/CN=bench")
        for host in hosts:
            (folder / "host.ext").write_text(EXTENSIONS.format(host=host))
            openssl(folder, "x509", "-req", "-in", "host.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                    "-days", "800", "-extfile", "host.ext", "-out", f"{host}.pem")  # fmt: skip
        complete.write_text(str(len(hosts)))
    return authority


def openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"openssl {words[0]} failed: {done.stderr.strip()}")
