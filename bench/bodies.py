"""Cost of one request's body for other requests: the longest time of ``/health`` meanwhile.

A thread requests ``/health`` again and again while bodies within all limits are sent, most of which
are wrong in many places. For each the median and the longest time of ``/health``, the status of the
answer and its seconds. "nothing" is the time without a body, on the same machine in the same run.

``python bench/bodies.py [--model tiny-python] [--rounds 3] [--only TEXT]``
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire_bench.reports import print_json, print_table
from quire_bench.serve_process import server_process

PERIOD = 0.002
"""Seconds between two calls of ``/health``."""
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, TOKENIZE, EACH = "/v1/messages", "/tokenize", "/v1/sessions/generate"
SESSIONS, WARM = "/v1/sessions", "/v1/warm"
USER = {"role": "user", "content": "a"}


def listed(item: str, count: int) -> str:
    return "[" + ",".join([item] * count) + "]"


def keyed(value: str, count: int) -> str:
    return "{" + ",".join(f'"{number}":{value}' for number in range(count)) + "}"


def bodies() -> Iterator[tuple[str, str, str]]:
    """Yield a name, a path and a body."""
    many = 45_000
    yield "each: 45,000 objects", EACH, f'{{"ids":["x"],"each":{listed("{}", many)}}}'
    yield (
        "ids: 45,000 texts, and each",
        EACH,
        f'{{"ids":{listed(chr(34) + "x" + chr(34), many)},"each":{listed("{}", many)}}}',
    )
    yield "each: 9,000 with 10 fields", EACH, f'{{"ids":["x"],"each":{listed(keyed("1", 10), 9_000)}}}'
    for name, path in (("completion", COMPLETION), ("chat", CHAT), ("responses", RESPONSES), ("messages", MESSAGES)):
        start = {
            COMPLETION: '"max_tokens":1,"prompt":"a",',
            RESPONSES: '"max_output_tokens":1,"input":"a",',
            **dict.fromkeys((CHAT, MESSAGES), f'"max_tokens":1,"messages":[{json.dumps(USER)}],'),
        }
        given = '{"model":"tiny-python",' + start[path]
        for key in ("stop_token_ids", "stop", "stop_sequences", "metadata", "tools", "logit_bias", "include"):
            yield f"{name}, {key}: 450,000 numbers", path, f'{given}"{key}":{listed("1", 450_000)}}}'
        yield f"{name}, stop: 450,000 texts", path, f'{given}"stop":{listed(chr(34) + chr(34), 450_000)}}}'
        yield (
            f"{name}, stop_token_ids: 450,000 texts",
            path,
            f'{given}"stop_token_ids":{listed(chr(34) * 2, 450_000)}}}',
        )
        yield f"{name}, logit_bias: 45,000 numbers", path, f'{given}"logit_bias":{keyed("1", many)}}}'
        yield f"{name}, logit_bias: 45,000 texts", path, f'{given}"logit_bias":{keyed(chr(34) * 2, many)}}}'
        yield f"{name}, metadata: 45,000 numbers", path, f'{given}"metadata":{keyed("1", many)}}}'
        yield f"{name}, 45,000 unknown fields", path, given + keyed("1", many)[1:]
        yield f"{name}, tools: 45,000 objects", path, f'{given}"tools":{listed("{}", many)}}}'
        tool = '{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
        yield f"{name}, tools: 9,000", path, f'{given}"tools":{listed(tool, 9_000)}}}'
        yield f"{name}, unread objects", path, f'{given}"unread":{listed("[1,1,1,1,1,1,1,1]", many)}}}'
        yield f"{name}, unread floats", path, f'{given}"unread":{listed("0.12345678901234", 450_000)}}}'
    part = '{"type":"text","text":"a"}'
    for name, path, key in (
        ("chat", CHAT, "messages"),
        ("session", SESSIONS, "messages"),
        ("tokenize", TOKENIZE, "messages"),
    ):
        yield f"{name}: 20,000 messages", path, f'{{"max_tokens":1,"{key}":{listed(json.dumps(USER), 20_000)}}}'
        yield f"{name}: 9,000 messages", path, f'{{"max_tokens":1,"{key}":{listed(json.dumps(USER), 9_000)}}}'
        yield f"{name}: 450,000 numbers as messages", path, f'{{"max_tokens":1,"{key}":{listed("1", 450_000)}}}'
        yield (
            f"{name}: 20,000 parts",
            path,
            f'{{"max_tokens":1,"{key}":[{{"role":"user","content":{listed(part, 20_000)}}}]}}',
        )
    yield (
        "responses: 20,000 messages",
        RESPONSES,
        f'{{"model":"tiny-python","max_output_tokens":1,"input":{listed(json.dumps(USER), 20_000)}}}',
    )
    yield (
        "messages: 20,000 messages",
        MESSAGES,
        f'{{"model":"tiny-python","max_tokens":1,"messages":{listed(json.dumps(USER), 20_000)}}}',
    )
    for name, path, key in (
        ("completion", COMPLETION, "prompt"),
        ("session", SESSIONS, "prompt"),
        ("warm", WARM, "segments"),
    ):
        yield f"{name}: 450,000 token ids", path, f'{{"max_tokens":1,"{key}":{listed("7", 450_000)}}}'
        yield f"{name}: 100,000 token ids", path, f'{{"max_tokens":1,"{key}":{listed("7", 100_000)}}}'
        yield f"{name}: 450,000 texts", path, f'{{"max_tokens":1,"{key}":{listed(chr(34) + "a" + chr(34), 450_000)}}}'
        yield f"{name}: 45,000 lists of ids", path, f'{{"max_tokens":1,"{key}":{listed("[7,7,7,7,7,7,7,7]", 45_000)}}}'
        yield (
            f"{name}: 20,000 parts",
            path,
            f'{{"max_tokens":1,"{key}":{listed(chr(123) + chr(34) + "text" + chr(34) + ":" + chr(34) + "a" + chr(34) + chr(125), 20_000)}}}',
        )
    yield "completion: a text of 16 MB", COMPLETION, '{"prompt":"' + "a" * 16_000_000 + '"}'
    yield "detokenize: 450,000 ids", "/detokenize", f'{{"tokens":{listed("7", 450_000)}}}'
    yield "detokenize: 450,000 texts", "/detokenize", f'{{"tokens":{listed(chr(34) * 2, 450_000)}}}'
    yield "session, 45,000 unknown fields", SESSIONS, keyed("1", many)
    yield "session, labels: 45,000 numbers", SESSIONS, f'{{"labels":{keyed("1", many)}}}'
    yield "session, 15 MB of texts", SESSIONS, f'{{"x":{listed(chr(34) + "a" + chr(34), 3_900_000)}}}'
    schema = '{"type":"object","properties":' + keyed('{"type":"string"}', 20_000) + "}"
    form = f'"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'
    yield "chat: a schema of 20,000 members", CHAT, f'{{"messages":[{json.dumps(USER)}],{form}}}'
    actions = listed('{"action_id":"a","action_type":"kv.pin","action_version":"1.0","payload":{}}', 8_000)
    yield (
        "completion: 8,000 hints",
        COMPLETION,
        (
            f'{{"prompt":"a","max_tokens":1,"kv_hints":{{"protocol_version":"0.1","message_id":"m","actions":{actions}}}}}'
        ),
    )


@dataclass
class Poller:
    """Requests ``/health`` until it is stopped."""

    host: str
    port: int
    seconds: list[float] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        while not self._end.wait(PERIOD):
            started = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.seconds.append(time.perf_counter() - started)

    def during(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, polling meanwhile."""
        self._end.clear()
        thread = threading.Thread(target=self.run)
        thread.start()
        time.sleep(10 * PERIOD)
        try:
            return call()
        finally:
            time.sleep(10 * PERIOD)
            self._end.set()
            thread.join()


def post(host: str, port: int, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=120)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def measure(host: str, port: int, call: Callable[[], Any], rounds: int) -> Mapping[str, Any]:
    poller = Poller(host, port)
    started = time.perf_counter()
    found = [poller.during(call) for _ in range(rounds)]
    seconds = (time.perf_counter() - started) / rounds - 20 * PERIOD
    ordered = sorted(poller.seconds)
    return {
        "status": found[0],
        "seconds": seconds,
        "median_ms": statistics.median(ordered) * 1e3,
        "longest_ms": ordered[-1] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names of the bodies to send")
    options = parser.parse_args()
    report = {}
    with server_process(options.model, ("--kv-cache-memory", "64MiB")) as server:
        address = urlsplit(server.url)
        host, port = str(address.hostname), int(address.port or 80)
        post(host, port, TOKENIZE, b'{"prompt":"a"}')  # the first request takes longest
        report["nothing"] = measure(host, port, lambda: time.sleep(0.5), options.rounds)
        for name, path, text in bodies():
            if options.only not in name:
                continue
            body = text.encode()
            call = lambda path=path, body=body: post(host, port, path, body)  # noqa: E731
            report[name] = {"bytes": len(body), **measure(host, port, call, options.rounds)}
            print(f"{report[name]['longest_ms']:7.0f} ms  {report[name]['seconds']:6.2f} s  {name}", file=sys.stderr)
    rows = [
        {
            "body": name,
            "MB": f"{one.get('bytes', 0) / 1e6:.1f}",
            "status": one["status"],
            "s": f"{one['seconds']:.3f}",
            "/health: median ms": f"{one['median_ms']:.1f}",
            "longest ms": f"{one['longest_ms']:.0f}",
        }
        for name, one in sorted(report.items(), key=lambda pair: -pair[1]["longest_ms"])
    ]
    print_table(rows)
    print_json(report)


if __name__ == "__main__":
    main()
