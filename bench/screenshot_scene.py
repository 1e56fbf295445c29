"""The scene of screenshots: sessions of the bundled model that fork, rewind, slide and are
committed, and load beside them. The same sessions and texts each time: greedy, or with seeds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

MODULE = '''"""Stacks and queues."""


class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item):
        """Put an item on top."""
        self.items.append(item)

    def pop(self):
        """Remove and return the item on top."""
        return self.items.pop()


class Queue:
    """First in, first out."""

    def __init__(self):
        self.items = []

'''
LOG = "".join(f"def step_{number}(x):\n    return x + {number}\n\n\n" for number in range(24))
HEADERS = ('def mean(values):\n    """Return the', "def is_prime(n):\n", "def read_lines(path):\n", "class Point:\n")


class Scene:
    """Sessions over HTTP."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=f"{url}/v1", timeout=300, trust_env=False)

    def post(self, path: str, **body: Any) -> Any:
        """Return the server's answer. ``RuntimeError``: it refused."""
        answer = self.client.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.text}")
        return answer.json()

    def session(self, prompt: str, name: str, **options: Any) -> str:
        """Make a session; return its id."""
        return str(self.post("/sessions", prompt=prompt, name=name, **options)["id"])

    def fork(self, session: str, name: str, at: int | None = None) -> str:
        """Fork a session; return the child's id."""
        return str(self.post(f"/sessions/{session}/fork", name=name, at=at)["ids"][0])

    def write(self, session: str, count: int, seed: int | None = None, prompt: str | None = None) -> None:
        """Generate more tokens in a session."""
        chosen = {"temperature": 0.0} if seed is None else {"temperature": 0.9, "seed": seed}
        self.post(f"/sessions/{session}/generate", prompt=prompt, max_tokens=count, ignore_eos=True, **chosen)

    def build(self) -> dict[str, str]:
        """Make the whole scene; return the ids of the sessions by name."""
        review = self.session(MODULE, "review", labels={"task": "42"}, pin=True)
        self.post(f"/sessions/{review}/commit", name="main", message="before the change")
        found = {"review": review}
        for number, (name, text) in enumerate(
            (
                ("put and get", '    def put(self, item):\n        """'),
                ("a deque", "    # A deque is quicker.\n    def append("),
                ("with types", "    def put(self, item: int) -> None:\n"),
            )
        ):
            found[name] = self.fork(review, name)
            self.write(found[name], 48, seed=number, prompt=text)
        found["shorter"] = self.fork(found["put and get"], "shorter", at=150)
        self.write(found["shorter"], 24, seed=9)
        self.write(review, 40)
        self.post(f"/sessions/{review}/commit", name="main", message="after the change")
        self.post(f"/sessions/{found['a deque']}/commit", name="try/deque", message="another way")
        found["follower"] = self.session(LOG, "log follower", window=96, sink=4)
        for number in range(6):
            self.post(f"/sessions/{found['follower']}/append", text=LOG[number * 80 : number * 80 + 160])
        for header in HEADERS:
            self.complete(header, 48)
        return found

    def complete(self, prompt: str, count: int, **options: Any) -> None:
        """Run a completion, which leaves a cached prefix."""
        self.post("/completions", prompt=prompt, max_tokens=count, temperature=0, ignore_eos=True, **options)

    def chat_turn(self, session: str, text: str) -> None:
        """Let a session answer a message."""
        self.post(f"/sessions/{session}/generate", messages=[{"role": "user", "content": text}], max_tokens=40, seed=1)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Keep five requests running: long prompts, some with common beginnings, one with a
        grammar."""
        over = threading.Event()

        def work(number: int) -> None:
            with httpx.Client(base_url=str(self.client.base_url), timeout=300, trust_env=False) as client:
                turn = 0
                while not over.is_set():
                    turn += 1
                    own = f"# {number}.{turn}\n" if turn % 2 else ""
                    prompt = own + MODULE * (1 + (turn + number) % 3) + HEADERS[(turn + number) % 4]
                    body: dict[str, Any] = {
                        "prompt": prompt,
                        "max_tokens": 24 + 24 * number,
                        "seed": turn,
                        "ignore_eos": True,
                    }
                    if number == 3:
                        body |= {"prompt": "x = ", "structured_outputs": {"regex": "[0-9]{20,40}"}, "ignore_eos": False}
                    client.post("/completions", content=json.dumps(body), headers={"content-type": "application/json"})

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(5)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()
