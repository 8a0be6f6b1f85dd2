"""A loopback server that speaks as much of the Hugging Face hub's HTTP API as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)


class HubServer(ThreadingHTTPServer):
    """Serves folders as repositories; `broken` ones answer 500, `gated` ones 403."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path], gated: str = "", broken: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.gated, self.broken = repositories, gated, broken
        self.downloads: list[str] = []  # paths of files that were sent
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").lstrip("/").split("/")
        repository = "/".join(parts[:2])
        if repository == self.server.gated:
            self._error(403, "GatedRepo")
        elif repository == self.server.broken:
            self._error(500, "")
        elif repository not in self.server.repositories:
            self._error(404, "RepoNotFound")
        elif len(parts) > 3 and parts[3] not in REVISIONS:
            self._error(404, "RevisionNotFound")
        else:
            folder = self.server.repositories[repository]
            if is_api:
                self._api(repository, parts[2], folder)
            else:
                self._file(folder / "/".join(parts[4:]), body)

    def _api(self, repository: str, call: str, folder: Path) -> None:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        if call == "tree":
            answer: Any = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)} for file in files
            ]
        else:
            siblings = [{"rfilename": file.name} for file in files]
            answer = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "tags": []}
        data = json.dumps(answer).encode()
        self._send(200, {"Content-Type": "application/json"}, data)

    def _file(self, file: Path, body: bool) -> None:
        if not file.is_file():
            self._error(404, "EntryNotFound")
            return
        if body:
            self.server.downloads.append(file.name)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(file)}"', "Content-Type": "application/octet-stream"}
        self._send(200, headers, file.read_bytes(), body=body)

    def _error(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code} if code else {}, b"")

    def _send(self, status: int, headers: dict[str, str], data: bytes, *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_server(repositories: dict[str, Path], *, gated: str = "", broken: str = "") -> Iterator[HubServer]:
    """Run a server in a thread until the block ends."""
    server = HubServer(repositories, gated, broken)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
