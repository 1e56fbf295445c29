"""What an engine gives up when pages or states are short."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.finalizers import FinalizerQueue
from quire.base.types import SeqId
from quire.branches.session_branches import SessionBranches
from quire.branches.stored_state import StoredState
from quire.engine.checkpoints import Checkpoints
from quire.engine.in_flight import InFlightSteps
from quire.engine.pins import PrefixPins
from quire.engine.requests import Requests
from quire.runner.reclaim import ReclaimKind


@dataclass(eq=False, kw_only=True)
class EngineReclaim:
    """An engine, as a ``SequenceOwner``."""

    requests: Requests
    in_flight: InFlightSteps
    branches: SessionBranches
    stored: StoredState
    checkpoints: Checkpoints | None
    prefix_pins: PrefixPins
    finalizers: FinalizerQueue

    def reclaim_one(self, kind: ReclaimKind) -> bool:
        """Give up one thing of this kind."""
        kept = self.checkpoints
        match kind:
            case ReclaimKind.FINALIZERS:
                # In a step the yielding request is alone, and asks for itself.
                return self.finalizers.run_finalizers() or (
                    not self.in_flight.stepping and self.requests.end_yielding()
                )
            case ReclaimKind.SCARCE_STATES:
                states = self.branches.runner.state.num_available_states
                return kept is not None and not states and kept.drop_one()
            case ReclaimKind.WRITING:
                return self.stored.drop_pending_writes()
            case ReclaimKind.PREFIXES:
                self.prefix_pins.expire()
                return self.branches.evict()
            case ReclaimKind.IDLE:
                return self.requests.yielding is None and self.branches.drop_idle()
            case ReclaimKind.STATES:
                return kept is not None and kept.drop_one()

    def reclaimable(self) -> set[SeqId]:
        """Return the sequences that it could give up."""
        return self.branches.reclaimable() | self.stored.forks
