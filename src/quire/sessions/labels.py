"""A session's name and labels. The engine does not use them; they are not in state files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quire.base.errors import InvalidArgument

MAX_NAME = 256
"""Characters of a name, at most."""
MAX_LABELS = 16
MAX_LABEL_NAME = 64
"""Characters of a label's name, at most."""
MAX_LABEL_VALUE = 512
"""Characters of a label's value, at most. These limits are as in OpenAI's metadata."""


NO_LABELS: Mapping[str, str] = MappingProxyType({})


def checked_name(name: object) -> str | None:
    """Return a name; ``InvalidArgument`` unless None or 1 to ``MAX_NAME`` printable characters."""
    if name is not None and not _is_text(name, MAX_NAME):
        raise InvalidArgument(field="name", given=name, allowed=f"1 to {MAX_NAME} printable characters")
    return name  # type: ignore[return-value]


def checked_labels(labels: object) -> Mapping[str, str]:
    """Return a read-only copy of labels. ``InvalidArgument`` unless they are strings by strings,
    and within the limits; a name holds no "=", which ends it where labels are searched for."""
    if not isinstance(labels, Mapping):
        raise InvalidArgument(field="labels", given=labels, allowed="a mapping of strings")
    if len(labels) > MAX_LABELS:
        raise InvalidArgument(f"labels has {len(labels)} entries; at most {MAX_LABELS} are kept", field="labels")
    for name, value in labels.items():
        if not _is_text(name, MAX_LABEL_NAME) or "=" in name:
            allowed = f'each name must be 1 to {MAX_LABEL_NAME} printable characters without "="'
            raise InvalidArgument(f"labels: {allowed}, got {name!r:.60}", field="labels")
        if value != "" and not _is_text(value, MAX_LABEL_VALUE):
            allowed = f"at most {MAX_LABEL_VALUE} printable characters"
            raise InvalidArgument(field=f"labels.{name}", given=value, allowed=allowed)
    return MappingProxyType(dict(labels))


def _is_text(value: object, most: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= most and value.isprintable()
