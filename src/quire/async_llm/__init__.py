"""``AsyncLLM``: the ``LLM`` for programs that await.

from quire import AsyncLLM, SamplingParams

async with AsyncLLM("tiny-python") as llm:
    outputs = await llm.generate(["def fib(n):"], SamplingParams(max_tokens=32))
    async for delta in llm.stream("def fib(n):"):
        print(delta.text, end="")
    async with await llm.session("class Stack:\\n") as session:
        await session.append("    def push(self, x):\\n")

One background thread steps the engine (``stepper``), so requests of all tasks run in one batch.
Event loops are never blocked: work that takes the engine's lock or tokenises runs on worker threads
(``background``). Requests keep their output, and ``stream`` reads it, so a slow consumer delays no
other.
"""

from quire.async_llm.llm import AsyncLLM
from quire.async_llm.session import AsyncSession
from quire.async_llm.stream import AsyncStream, SampleDelta

__all__ = ["AsyncLLM", "AsyncSession", "AsyncStream", "SampleDelta"]
