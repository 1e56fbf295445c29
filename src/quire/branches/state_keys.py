"""``StateKeys``: the keys of one engine's state in stores.

Keys and contents name everything that the state depends on: model, layout, tokens, adapters, salt.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from quire.adapters.history import FingerprintRuns, fingerprint_runs
from quire.adapters.keys import is_private
from quire.base.token_history import Ids
from quire.blend.chunks import ChunkKeys
from quire.branches.branch import Branch
from quire.branches.object_layout import ObjectLayout
from quire.models.fingerprint import ModelIdentity
from quire.runner.local import Runner
from quire.store.keys import Chain, StoredPiece, root_key
from quire.store.objects import Contents

ROOTS = 1024
"""Most salts whose roots are kept."""


class StateKeys:
    """The keys of histories and of chunks, and the expected contents of their objects."""

    def __init__(self, runner: Runner, identity: ModelIdentity | None) -> None:
        """``identity`` None: keys are for this process only. The identity's digest of the weights
        reads all of them."""
        self._runner = runner
        self._identity = identity
        self._layout: ObjectLayout | None = None
        self._layout_hash = ""
        self._model: Mapping[str, str] = {}
        self._roots: OrderedDict[str, bytes] = OrderedDict()

    @property
    def layout(self) -> ObjectLayout:
        """The layout of this state's objects. The first access makes it, and reads the fields of
        the model that keys depend on."""
        if self._layout is None:
            own = {"architecture": "", "config": "", "weights": secrets.token_hex(16)}
            self._model = own if self._identity is None else self._identity.fields()
            self._layout_hash = self._runner.state.get_layout_hash()
            self._layout = ObjectLayout(self._runner.state)
        return self._layout

    def chain(self, ids_T: Ids, runs: FingerprintRuns, salt: Hashable) -> Chain:
        """Return the keys of a history."""
        layout, name = self.layout, repr(salt)
        if name not in self._roots:
            if len(self._roots) >= ROOTS:
                self._roots.popitem(last=False)
            dtype = str(getattr(self._runner.model, "dtype", ""))
            self._roots[name] = root_key(self._model, self._layout_hash, dtype, salt, layout.chunk)
        return Chain.of(self._roots[name], ids_T, runs, layout.chunk)

    def chunk_keys(self, salt: Hashable, adapter: str | None, lead: Sequence[int]) -> ChunkKeys:
        """Return the keys of chunks for prompts with a salt, under the adapter with fingerprint
        ``adapter``."""
        _ = self.layout  # computing the layout also sets the model's identity
        of_model = (self._model, self._layout_hash, str(getattr(self._runner.model, "dtype", "")))
        return ChunkKeys.of(*of_model, salt, adapter=adapter, lead=lead, private=is_private(salt))

    def chain_of(self, branch: Branch, length: int) -> Chain:
        """Return the keys of the first tokens of a branch."""
        runs = fingerprint_runs(branch.runs, lambda one: self._runner.adapters.get(one).fingerprint)
        # A session's window changes its state, so the window is part of the key.
        salt = branch.salt if branch.window is None else (branch.salt, branch.window.size, branch.window.sink)
        return self.chain(branch.tokens.ids[:length].copy(), runs, salt)

    def contents(self, chain: Chain, piece: StoredPiece) -> Contents:
        """Return the expected contents of an object."""
        tokens, adapters = chain.between(piece.stop - piece.key.count, piece.stop)
        return Contents(self._model, self._layout_hash, tokens, adapters)
