"""Message bodies as token ids: whatever a text looks like, no control token comes of it."""


def without_surrogates(text: str) -> str:
    """`text` with each lone surrogate replaced by U+FFFD; the same object when it has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    return text
