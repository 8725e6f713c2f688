"""A small Hub on loopback: what huggingface_hub asks of the real one to create, upload, commit and download."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_fake"


class Repository:
    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.branches: dict[str, str] = {}
        self.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        name = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[name] = files
        self.messages.append(message)
        self.branches[branch] = name
        return name

    def find(self, revision: str) -> str | None:
        name = self.branches.get(revision, revision)
        return name if name in self.commits else None

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


class FakeHub:
    """Repositories by name, blobs by SHA-256; `requests` holds what was asked, as `METHOD path`.

    The next `drops` uploads of blobs are cut off in the middle; with `down`, all but the first `down` are.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.drops = 0
        self.down: int | None = None
        hub = self
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def stored(self) -> list[str]:
        """Uploads of blobs that were begun."""
        return [line for line in self.requests if line.startswith("PUT ")]


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, what: str) -> None:
        self.answer({"error": f"{what} not found"}, 404, X_Error_Code=f"{what}NotFound")

    def handle_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.command == "PUT":
            return self.put_blob(path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self.command == "POST" else b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if path == "/":
            return self.answer(b"")
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if found := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            return self.batch(json.loads(body))
        if found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(\w+)/?(.*))?", path):
            verb, rest = found[2] or "revision", found[3] or "main"
        elif found := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/(refs/pr/\d+|[^/]+)/(.+)", path):
            verb, rest = "resolve", found[2]
        else:
            return self.missing("Entry")
        repository = self.hub.repositories.get(found[1])
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not allowed):
            return self.missing("Repo")
        if verb == "branch":
            status = 409 if rest in repository.branches else 200
            repository.branches.setdefault(rest, repository.branches["main"])
            return self.answer({}, status)
        commit = repository.find(rest)
        if commit is None:
            return self.missing("Revision")
        files = repository.commits[commit]
        if verb == "revision":
            siblings = [{"rfilename": name} for name in files]
            about = {"id": found[1], "sha": commit, "private": repository.private, "siblings": siblings, "tags": []}
            return self.answer(about)
        if verb == "tree":
            return self.answer([self.entry(name, content) for name, content in files.items()])
        if verb == "preupload":
            return self.answer({"files": [self.mode(file, files) for file in json.loads(body)["files"]]})
        if verb == "commit":
            return self.commit(found[1], repository, rest, dict(files), body)
        if found[3] not in files:
            return self.answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = files[found[3]]
        self.answer(content, X_Repo_Commit=commit, ETag=f'"{hashlib.sha256(content).hexdigest()}"')

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def create(self, asked: dict) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            return self.answer(url, 409)
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repositories[name] = Repository(bool(private))
        self.answer(url)

    def entry(self, path: str, content: bytes) -> dict:
        return {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}

    def mode(self, file: dict, files: dict[str, bytes]) -> dict:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        held = files.get(file["path"])
        oid = None if held is None else hashlib.sha256(held).hexdigest() if mode == "lfs" else git_oid(held)
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def batch(self, asked: dict) -> None:
        objects = []
        for wanted in asked["objects"]:
            if wanted["oid"] not in self.hub.blobs:
                wanted = {**wanted, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}}
            objects.append(wanted)
        self.answer({"transfer": "basic", "objects": objects})

    def put_blob(self, path: str) -> None:
        size, hub = int(self.headers["Content-Length"]), self.hub
        cut = hub.drops > 0 or (hub.down is not None and len(hub.blobs) >= hub.down)
        content = self.rfile.read(size // 2 if cut else size)
        if cut:
            hub.drops -= 1
            self.close_connection = True
            return self.connection.close()
        name = path.removeprefix("/lfs/")
        assert hashlib.sha256(content).hexdigest() == name
        hub.blobs[name] = content
        self.answer(b"")

    def commit(self, name: str, repository: Repository, branch: str, files: dict[str, bytes], body: bytes) -> None:
        message = ""
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            else:
                del files[value["path"]]
        oid = repository.commit(branch, files, message)
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})


def git_oid(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
