"""Downloads from a server on this machine, which can break off, and which may know ranges or not."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spanformer.data.download import download

CONTENT = bytes(range(256)) * 4000
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Server(http.server.ThreadingHTTPServer):
    ranges = True
    break_after: int | None = None
    served: list[tuple[int, int]]  # (first byte, how many) of each answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/corpus.zip"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if self.server.ranges else None
        start = int(asked[1]) if asked else 0
        if self.path != "/corpus.zip":
            return self.send_error(404)
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            return self.end_headers()
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        body = CONTENT[start:][: self.server.break_after]
        self.server.served.append((start, len(body)))
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as running:
        running.served = []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_whole_file_with_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, float, float]] = []
    download(server.url, tmp_path / "a.zip", digest=DIGEST, on_progress=lambda *told: seen.append(told))
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert not (tmp_path / "a.zip.part").exists()
    assert seen[-1] == (f"downloading {server.url}", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    download(server.url, tmp_path / "a.zip")  # it is there, so nobody is asked again
    assert len(server.served) == 1


def test_interrupted_download_is_resumed(server: Server, tmp_path: Path) -> None:
    server.break_after = 300_001
    for have in (300_001, 600_002):
        with pytest.raises(ValueError, match=rf"ended after {have} of {len(CONTENT)} bytes\); try again"):
            download(server.url, tmp_path / "a.zip", digest=DIGEST)
        assert not (tmp_path / "a.zip").exists()
    server.break_after = None
    download(server.url, tmp_path / "a.zip", digest=DIGEST)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.served == [(0, 300_001), (300_001, 300_001), (600_002, len(CONTENT) - 600_002)]


def test_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "a.zip.part").write_bytes(b"stale" * 100)
    download(server.url, tmp_path / "a.zip")
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


@pytest.mark.parametrize("extra", [b"", b"and more"], ids=["complete", "too long"])
def test_part_that_is_complete_or_too_long(server: Server, tmp_path: Path, extra: bytes) -> None:
    (tmp_path / "a.zip.part").write_bytes(CONTENT + extra)
    download(server.url, tmp_path / "a.zip", digest=DIGEST)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.served == ([(0, len(CONTENT))] if extra else [])


def test_wrong_digest_is_refused_and_removed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(b"some other file")
    with pytest.raises(ValueError, match=rf"has sha256:\w+; expected {DIGEST}, so the download was removed"):
        download(server.url, tmp_path / "a.zip", digest=DIGEST)
    assert not (tmp_path / "a.zip.part").exists() and not (tmp_path / "a.zip").exists()
    download(server.url, tmp_path / "a.zip", digest=DIGEST)


def test_several_at_once_download_once(server: Server, tmp_path: Path) -> None:
    threads = [threading.Thread(target=download, args=(server.url, tmp_path / "a.zip")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a.zip").read_bytes() == CONTENT and len(server.served) == 1


def test_missing_url_is_refused_with_a_remedy(server: Server, tmp_path: Path) -> None:
    missing = server.url.replace("corpus", "nothing")
    with pytest.raises(ValueError, match=rf"{missing} could not be downloaded \(Not Found\); .* --data.from PATH"):
        download(missing, tmp_path / "a.zip")
    with pytest.raises(ValueError, match=r"http://127.0.0.1:1/a could not be downloaded \(.*refused.*--data.from PATH"):
        download("http://127.0.0.1:1/a", tmp_path / "a.zip")
