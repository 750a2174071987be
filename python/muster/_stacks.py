# Sends the stacks of this process's threads to a Muster server when an operator asks for them, or when a barrier is stuck.
#
# A server also serves this file, at /helper.py, followed by a call of its only function. It needs Python 3.9 or newer, and
# nothing but its standard library. It defines one name, and has no docstring, because a program may run it in a module of
# its own.


def show_stacks(
    server: "str | None" = None, *, job: "str | None" = None, task: "int | None" = None, token: "str | None" = None
) -> None:
    """Lets the server ask for the stacks of this process's threads. Returns at once, and never raises.

    A daemon thread holds one request at the server, and does nothing until it is answered. When the server asks, the thread
    reads the stacks of all threads: names of functions and files and numbers of lines, and no values. A second call
    replaces the first. A forked child sends nothing unless it calls this function itself.

    server  the HTTP address, such as http://HOST:8477 (or MUSTER_SERVER)
    job     the job (or MUSTER_JOB, or the only job of the server)
    task    the number of this task (or what jax.distributed.initialize() was given, or MUSTER_PROCESS_ID)
    token   a token with the role viewer (or MUSTER_TOKEN, or the file MUSTER_TOKEN_FILE)

    For https, MUSTER_CA, MUSTER_CERT and MUSTER_KEY name the files with the certificates.
    """
    import http.client
    import json
    import logging
    import os
    import random
    import socket
    import ssl
    import sys
    import threading
    import time
    from typing import Any
    from urllib.parse import quote, urlsplit

    # What one answer may have at most. The server refuses more than 256 threads or 128 frames, and 256 KiB.
    threads_max, frames_max, depth_max, bytes_max = 128, 100, 10_000, 240_000
    # The first bytes of a name are kept, and the last of a path.
    name_max, path_max = 180, 280
    wait_s, timeout_s, pause_max_s, answer_bytes_max = 25, 40.0, 60.0, 1 << 20
    log = logging.getLogger("muster")
    # The generator of the program is left alone.
    chance = random.Random(os.urandom(16))

    def readable(text: object) -> str:
        return str(text).encode("utf-8", "replace").decode("utf-8")

    def read_stack(frame: Any) -> "tuple[list[dict[str, object]], int]":
        frames: "list[dict[str, object]]" = []
        depth = 0
        while frame is not None and depth < depth_max:
            if depth < frames_max:
                code = frame.f_code
                function = readable(getattr(code, "co_qualname", code.co_name))[:name_max]
                path = readable(code.co_filename)[-path_max:]
                frames.append({"function": function, "file": path, "line": frame.f_lineno or 0})
            depth += 1
            frame = frame.f_back
        frames.reverse()
        return frames, depth - len(frames)

    def read_stacks() -> "list[dict[str, object]]":
        own, main = threading.get_ident(), threading.main_thread().ident
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = []
        # Frames keep the values of their functions alive, so they are dropped at once.
        current = sys._current_frames()
        try:
            for ident in sorted(current, key=lambda ident: ident != main):
                frame = current.pop(ident)
                if ident != own:
                    frames, left_out = read_stack(frame)
                    name = readable(names.get(ident, "a thread that is not Python's"))[:name_max]
                    stack = {"name": name, "main": ident == main, "frames": frames, "frames_left_out": left_out}
                    stacks.append(stack)
                del frame
        finally:
            current.clear()
        return stacks

    def encode_answer(request: "dict[str, Any]", number: int, stacks: "list[dict[str, object]]") -> bytes:
        texts, size = [], 1000
        for stack in stacks[:threads_max]:
            text = json.dumps(stack)
            size += len(text) + 1
            if size > bytes_max:
                break
            texts.append(text)
        head = {"request": int(request["number"]), "ticket": str(request["ticket"]), "task": number}
        head["threads_left_out"] = len(stacks) - len(texts)
        return (json.dumps(head)[:-1] + ', "threads": [' + ",".join(texts) + "]}").encode()

    class StackHelper:
        """The settings of one call, and the thread that serves it."""

        def __init__(self) -> None:
            self.pid = os.getpid()
            self.ended = False
            self.connection: "http.client.HTTPConnection | None" = None
            self.job = job or os.environ.get("MUSTER_JOB") or None
            self.told: "set[str]" = set()
            address = server or os.environ.get("MUSTER_SERVER") or "http://127.0.0.1:8477"
            parts = urlsplit(address if "://" in address else f"http://{address}")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{address!r} is no server: give its HTTP address, such as http://127.0.0.1:8477")
            self.host = parts.hostname
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
            self.tls: "ssl.SSLContext | None" = None
            if parts.scheme == "https":
                self.tls = ssl.create_default_context(cafile=os.environ.get("MUSTER_CA") or None)
                if os.environ.get("MUSTER_CERT"):
                    self.tls.load_cert_chain(os.environ["MUSTER_CERT"], os.environ.get("MUSTER_KEY") or None)

        def warn(self, text: str) -> None:
            """Logs a text once."""
            if text not in self.told:
                self.told.add(text)
                log.warning("no stacks are sent to Muster: %s", text)

        def read_token(self) -> "str | None":
            path = os.environ.get("MUSTER_TOKEN_FILE")
            if token is None and path:
                with open(path, encoding="utf-8") as file:
                    return file.read(1 << 16).strip() or None
            return token or os.environ.get("MUSTER_TOKEN", "").strip() or None

        def send(self, method: str, path: str, body: "bytes | None" = None) -> "tuple[int, Any]":
            """Makes a request. No proxy is used, and no redirect is followed: the token goes to the server alone."""
            headers = {"accept": "application/json", "connection": "close", "user-agent": "muster-helper"}
            secret = self.read_token()
            if secret is not None:
                headers["authorization"] = f"Bearer {secret}"
            if body is not None:
                headers["content-type"] = "application/json"
            if self.tls is not None:
                connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    self.host, self.port, timeout=timeout_s, context=self.tls
                )
            else:
                connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
            self.connection = connection
            try:
                connection.request(method, path, body=body, headers=headers)
                answer = connection.getresponse()
                text = answer.read(answer_bytes_max)
                return answer.status, json.loads(text) if text else None
            finally:
                self.connection = None
                connection.close()

        def own_task(self) -> "int | None":
            """Returns the number of this task, once it is known. JAX is not imported for it."""
            if task is not None:
                return int(task)
            state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
            if getattr(state, "client", None) is not None:
                return int(getattr(state, "process_id"))  # noqa: B009
            given = os.environ.get("MUSTER_PROCESS_ID", "")
            return int(given) if given.isdigit() else None

        def own_job(self) -> "str | None":
            if self.job is None:
                status, answer = self.send("GET", "/api/v1/jobs")
                if status != 200:
                    self.check(status, answer)
                    return None
                names = [str(one["name"]) for one in answer["jobs"]]
                if len(names) == 1 or "default" in names:
                    self.job = names[0] if len(names) == 1 else "default"
                elif names:
                    self.warn("which job? Give job=, or set MUSTER_JOB")
            return self.job

        def check(self, status: int, answer: Any) -> None:
            """Raises unless the server has accepted a request."""
            if status >= 300:
                detail = answer.get("detail") if isinstance(answer, dict) else None
                if status in (401, 403, 404, 421):
                    self.warn(str(detail or status))
                # A wrong token is not tried again soon: the server counts wrong tokens of this network.
                raise (PermissionError if status in (401, 403, 421) else OSError)(f"status {status}")

        def serve_once(self, number: int, after: int) -> "tuple[int, float]":
            """Waits for a request and answers it. Returns the last request and the pause until the next call."""
            name = self.own_job()
            if name is None:
                return after, 10.0
            jobs, began = f"/api/v1/jobs/{quote(name, safe='')}/stacks", time.monotonic()
            status, answer = self.send("GET", f"{jobs}/requests?task={number}&after={after}&wait_seconds={wait_s}")
            self.check(status, answer)
            request = answer.get("request")
            if request is None or self.ended:
                if answer.get("retry_ms"):
                    return after, min(float(answer["retry_ms"]) / 1000, pause_max_s) * chance.uniform(0.5, 1.5)
                return after, 0.0 if time.monotonic() - began >= 1 else 1.0
            body = encode_answer(request, number, read_stacks())
            pause = min(float(request.get("spread_ms") or 0) / 1000, pause_max_s) * chance.random()
            for attempt in range(6):
                time.sleep(pause)
                pause = (2**attempt) * chance.uniform(0.5, 1.5)
                try:
                    status, answer = self.send("POST", f"{jobs}/answers", body)
                except (OSError, http.client.HTTPException, ValueError):
                    continue
                # What is refused for another reason than load is refused again.
                if status not in (408, 429, 500, 503):
                    break
            return int(request["number"]), 0.0

        def run(self) -> None:
            after, failures = 0, 0
            while not self.ended:
                try:
                    number = self.own_task()
                    if number is None:
                        pause, failures = min(1.0 + failures, 10.0), failures + 1
                    else:
                        after, pause = self.serve_once(number, after)
                        failures = 0
                except Exception as error:
                    log.debug("no connection to Muster for stacks: %r", error)
                    failures = 6 if isinstance(error, PermissionError) else min(failures + 1, 6)
                    pause = min(2.0**failures, pause_max_s) * chance.uniform(0.5, 1.5)
                if pause > 0 and not self.ended:
                    time.sleep(pause)

        def serve(self) -> None:
            try:
                self.run()
            except BaseException:
                # The interpreter ends, and with it this thread.
                return

        def stop(self) -> None:
            self.ended = True
            connection = self.connection
            stream = None if connection is None else connection.sock
            if stream is not None:
                stream.shutdown(socket.SHUT_RDWR)

    try:
        helper = StackHelper()
        former = getattr(sys, "_muster_stacks", None)
        # The thread of a parent process does not exist in a forked child.
        if former is not None and former.pid == os.getpid():
            try:
                former.stop()
            except OSError:
                pass
        setattr(sys, "_muster_stacks", helper)  # noqa: B010
        threading.Thread(target=helper.serve, name="muster-stacks", daemon=True).start()
    except Exception as error:
        log.warning("no stacks are sent to Muster: %s", error)
