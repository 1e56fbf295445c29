"""``AsyncLLM``: the ``LLM`` for programs that await.

from quire import AsyncLLM, SamplingParams

async with AsyncLLM("tiny-python") as llm:
    outputs = await llm.generate(["def fib(n):"], SamplingParams(max_tokens=32))
    async for delta in llm.stream("def fib(n):"):
        print(delta.text, end="")
    async with await llm.session("class Stack:\\n") as session:
        await session.append("    def push(self, x):\\n")

One background thread steps the engine for everybody (``stepper``), so that whatever is awaited at the same time runs in one batch.
Event loops are never blocked: what takes the engine's lock or tokenises runs on worker threads (``background``). Requests keep
their own output (``stream`` looks at it), so a consumer that is slow, or gone, holds up nobody.
"""

from quire.async_llm.llm import AsyncLLM
from quire.async_llm.session import AsyncSession
from quire.async_llm.stream import AsyncStream, SampleDelta

__all__ = ["AsyncLLM", "AsyncSession", "AsyncStream", "SampleDelta"]
