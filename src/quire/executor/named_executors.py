"""Executors by name."""

from __future__ import annotations

from quire.base.registry import Registry
from quire.base.signatures import checks_arguments
from quire.contracts.executor import ExecutorMetrics, ModelExecutor


@checks_arguments()
class NamedExecutors:
    """See ``ExecutorRegistry``."""

    def __init__(self) -> None:
        self._items: Registry[ModelExecutor] = Registry("executor")

    def register(self, name: str, executor: ModelExecutor) -> ModelExecutor:
        return self._items.register(name, executor)

    def get(self, name: str) -> ModelExecutor | None:
        return self._items.get(name)

    def require(self, name: str) -> ModelExecutor:
        """Return the executor; ``NotFound`` lists the registered names. An addition to the
        contract."""
        return self._items.require(name)

    def remove(self, name: str) -> ModelExecutor | None:
        return self._items.remove(name)

    def list_names(self) -> list[str]:
        return self._items.list_names()

    def get_metrics(self, name: str) -> ExecutorMetrics | None:
        found = self._items.get(name)
        return None if found is None else found.metrics()
