"""Users' texts as they may be shown: nothing in them is markup, a command or turns a line round."""

from __future__ import annotations

import html
import unicodedata

MOST_SHOWN = 80
"""Characters of a text that are shown, at most, both ends of a longer one."""
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Categories of characters that a terminal obeys, that turn texts round, or that nothing shows."""


def visible(text: str) -> str:
    """Return a text on one line, with invisible characters spelled as in Python (``\\n``)."""
    return "".join(_spelled(one) if unicodedata.category(one) in _UNSEEN else one for one in text)


def _spelled(character: str) -> str:
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    if known is not None:
        return known
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def short(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text as ``visible`` does, of a long one both ends."""
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[len(text) - most // 2 :]}"
    return visible(text)


def in_html(text: str) -> str:
    """Return a text to stand in HTML, between tags or in a quoted attribute."""
    return html.escape(visible(text), quote=True)


def in_code(text: str) -> str:
    """Return a user's text as HTML in which nothing outside of it is turned round."""
    return f'<code style="white-space:pre-wrap"><bdi>{in_html(text)}</bdi></code>'


def in_figure(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text that matplotlib does not take for a formula."""
    return short(text, most).replace("$", r"\$")
