"""Requests the event stream in many ways, for a few seconds, and checks every event against the OpenAPI description.

    stream.py URL
"""

import http.client
import json
import sys
import time
from urllib.parse import urlsplit

import jsonschema_rs

PATH = "/api/v1/jobs/default/events"
JSON = {"content-type": "application/json"}
# The time after which a silent stream is no longer read.
SILENCE_S = 0.5


def ask(address, method, path, headers, body=None):
    connection = http.client.HTTPConnection(address, timeout=SILENCE_S)
    connection.request(method, path, body=body, headers=headers)
    return connection, connection.getresponse()


def said(address, query, headers):
    """Returns the status, the media type, and the received events as (id, kind, data)."""
    connection, answer = ask(address, "GET", PATH + query, headers)
    kind, events, event, end = answer.getheader("content-type", ""), [], {}, time.monotonic() + 3
    try:
        while kind == "text/event-stream" and time.monotonic() < end:
            line = answer.readline().decode().rstrip("\r\n")
            if line:
                field, _, value = line.partition(":")
                event[field] = value.removeprefix(" ")
            elif event:
                events.append((event.get("id"), event.get("event"), event.get("data")))
                event = {}
    except TimeoutError:
        pass
    finally:
        connection.close()
    return answer.status, kind, [event for event in events if event[2] is not None]


def main(address):
    description = json.load(ask(address, "GET", "/api/v1/openapi.json", {})[1])
    schema = {"$ref": "#/components/schemas/EventLine", "components": description["components"]}
    line = jsonschema_rs.Draft202012Validator(schema)
    kinds = set(description["components"]["schemas"]["Change"]["discriminator"]["mapping"])
    assert len(kinds) > 20, kinds

    # Changes that make events.
    reason = {"reason": "why"}
    for method, path, body in [
        ("POST", "/exclusions", {"host": "192.0.2.99", **reason}),
        ("PATCH", "", {"settings": {"heartbeat_timeout": "90s"}, **reason}),
        ("PUT", "/keys/a/b", {"text": "c", "overwrite": True, **reason}),
    ]:
        ask(address, method, "/api/v1/jobs/default" + path, JSON, json.dumps(body))

    seen = set()
    accept = {"accept": "text/event-stream"}
    for query, headers in [
        ("?stream=1", {}),
        ("", accept),
        ("?after=0&limit=1", accept),
        ("?stream=1&after=2", {"last-event-id": "1"}),
        ("?stream=1", {"last-event-id": "no number"}),
        ("?stream=1&after=18446744073709551615", {}),
        ("", {**accept, "last-event-id": "18446744073709551615"}),
        ("?stream=255", {}),
    ]:
        status, kind, events = said(address, query, headers)
        assert (status, kind) == (200, "text/event-stream"), (query, headers, status, kind)
        assert events, (query, headers)
        for number, what, data in events:
            if what == "gap":
                continue
            event = json.loads(data)
            line.validate(event)
            assert (event["kind"], str(event["number"])) == (what, number), (event, what, number)
            assert what in kinds, what
            seen.add(what)
    assert {"job-declared", "run-opened", "excluded", "settings-changed", "key-written"} <= seen, seen

    for query in ["?stream=1&after=-1", "?stream=x", "?stream=256", "?stream=1&after=18446744073709551616", "?stream=1&what=1"]:
        status, kind, _ = said(address, query, {})
        assert (status, kind) == (400, "application/problem+json"), (query, status, kind)
    broken = {"number": 1, "at": 1, "job": "a", "run": 1, "reason": "", "kind": "excluded"}
    assert not line.is_valid(broken), "the description tells kinds apart"
    print(f"streams: {len(seen)} kinds of events, all as described")


main(urlsplit(sys.argv[1]).netloc)
