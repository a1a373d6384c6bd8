"""A registry on loopback that serves one Docker image and one .sif over ORAS: the two requests that a fetch makes."""

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    """Blobs and manifests by digest or tag."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.address = ""

    def put(self, content: bytes, media_type: str, **more: object) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs[digest] = content
        return {"mediaType": media_type, "digest": digest, "size": len(content), **more}

    def tag(self, name: str, config: dict[str, object], layers: list[dict[str, object]]) -> None:
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
        content = json.dumps(manifest).encode()
        self.manifests[name] = content
        self.manifests[f"sha256:{hashlib.sha256(content).hexdigest()}"] = content

    def add_docker(self, name: str, rootfs: Path) -> None:
        """An image of one layer."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            tar.add(rootfs, ".", filter=lambda member: None if member.isdev() else member)
        plain = layer.getvalue()
        config = {
            "architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/bin:/bin", "FROM_HUB=yes"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(plain).hexdigest()}"]},
        }  # fmt: skip
        self.tag(
            name,
            self.put(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
            [self.put(gzip.compress(plain, 1), "application/vnd.oci.image.layer.v1.tar+gzip")],
        )

    def add_oras(self, name: str, image: Path) -> None:
        """A .sif as it lies."""
        self.tag(
            name,
            self.put(b"{}", "application/vnd.sylabs.sif.config.v1+json"),
            [
                self.put(
                    image.read_bytes(),
                    "application/vnd.sylabs.sif.layer.v1.sif",
                    annotations={"org.opencontainers.image.title": "image.sif"},
                )
            ],
        )


@contextmanager
def serving(registry: Registry) -> Iterator[str]:
    """Serve it; yields HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, _, name = self.path.rpartition("/")
            if self.path == "/v2/":
                self.answer(200, b"{}", "application/json")
            elif kind.endswith("/manifests") and name in registry.manifests:
                self.answer(200, registry.manifests[name], MANIFEST)
            elif kind.endswith("/blobs") and name in registry.blobs:
                self.answer(200, registry.blobs[name], "application/octet-stream")
            else:
                self.answer(404, b"{}", "application/json")

        do_HEAD = do_GET

        def answer(self, status: int, content: bytes, media_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(content).hexdigest()}")
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it asks twice and hangs up once
                    self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
