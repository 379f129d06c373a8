# SPDX-License-Identifier: Apache-2.0
"""A hub on loopback: the endpoints that huggingface_hub uses, over folders of this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REVISIONS = {"main": "a" * 40, "v1": "b" * 40}


@dataclass
class Repository:
    """One model: its files by name, and who may have it."""

    files: Mapping[str, bytes]
    token: str = ""  # that its files need
    is_gated: bool = False
    is_open: bool = True  # else a wrong token is refused as such
    commit: str = ""  # a wrong one, to be named instead of the revision's
    marks: Mapping[str, str] = field(default_factory=dict[str, str])  # headers to be sent instead of the right ones


@dataclass
class StubHub:
    """What the hub has, and what it was asked for."""

    repositories: dict[str, Repository] = field(default_factory=dict[str, Repository])
    asked: list[str] = field(default_factory=list[str])
    url: str = ""
    refusing: str = ""  # a file that gives an error of the server's

    def fetched(self) -> set[str]:
        """Return the names of files that were downloaded."""
        paths = (line.removeprefix("GET ") for line in self.asked if line.startswith("GET "))
        return {path.split("/", 5)[5] for path in paths if "/resolve/" in path}

    def environment(self, home: Path) -> dict[str, str]:
        """Return variables by which a process knows this hub alone."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1"}


def repository_of(folder: Path, **more: bytes) -> Repository:
    """Return a repository with a folder's files."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return Repository(files | more)


@contextmanager
def serve_hub() -> Iterator[StubHub]:
    """Run a hub that has nothing yet."""
    hub = StubHub()

    class Handler(_Handler):
        stub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=lambda: server.serve_forever(0.01))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    stub: StubHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *_: object) -> None:
        """Write nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.stub.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        is_listing = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_listing else parts[:2])
        repository = self.stub.repositories.get(name)
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token != key and not repository.is_gated and repository.token):
            self._send(401, {"X-Error-Code": "RepoNotFound"})
        elif not repository.is_open and repository.token != key:
            self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif self.stub.refusing and parts[-1] == self.stub.refusing:
            self._send(410, {})
        elif is_listing:
            self._list(name, repository, parts[5] if len(parts) > 5 else "main")
        elif repository.token != key and repository.token:
            self._send(403, {"X-Error-Code": "GatedRepo"})
        else:
            self._send_file(repository, parts[3], "/".join(parts[4:]))

    def _list(self, name: str, repository: Repository, revision: str) -> None:
        commit = REVISIONS.get(revision, revision if revision in REVISIONS.values() else "")
        if not commit:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": file, "size": len(data)} for file, data in repository.files.items()]
        body = {"id": name, "sha": repository.commit or commit, "private": False, "siblings": siblings}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _send_file(self, repository: Repository, commit: str, file: str) -> None:
        data = repository.files.get(file)
        if data is None:
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        marks = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        self._send(200, {**marks, **repository.marks}, data)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
