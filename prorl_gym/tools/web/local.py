"""Searches a folder of documents by BM25: the same results every time, and no network."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.tools.web.failure import WebFailure
from prorl_gym.tools.web.provider import Hit, SearchProvider

SCHEME = "local://"
PLAIN_SUFFIXES = frozenset({".txt", ".md", ".rst"})
ROWS_SUFFIX = ".jsonl"
EXCERPT_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the folder."""

    title: str
    url: str
    text: str


class LocalSearch(SearchProvider):
    """Every .txt, .md and .rst file under a folder, and every row of its .jsonl files, held in memory.

    A row has `text` or `contents`, and may have `title`, `id` and `url`, under which it is then fetched.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._documents: list[Document] = []
        self._by_url: dict[str, Document] = {}
        self._index: Any = None

    async def start(self) -> None:
        """Read and index the folder; again after a stop."""
        if self._index is None:
            await asyncio.to_thread(self._build)

    async def stop(self) -> None:
        """Let go of it."""
        self._documents, self._by_url, self._index = [], {}, None

    async def search(self, query: str, count: int) -> list[Hit]:
        """See `SearchProvider.search`. A document that shares no word with the query is no result."""
        return await asyncio.to_thread(self._search, query, count)

    def read(self, url: str) -> str | None:
        """The document that was found under `url`."""
        document = self._by_url.get(url.strip())
        if document is None:
            raise WebFailure(
                f"There is no document {url.strip()[:200]!r}. Only those that web_search gives can be read.",
                "bad_address",
            )
        return document.text

    def _build(self) -> None:
        where = f"tool.web.documents={self._folder}"
        if not self._folder.is_dir():
            raise ConfigError(f"{where}: no such folder")
        try:
            documents = list(_documents(self._folder))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from error
        if not any(document.text.strip() for document in documents):
            kinds = ", ".join(sorted({*PLAIN_SUFFIXES, ROWS_SUFFIX}))
            raise ConfigError(f"{where}: no documents in it; files that count: {kinds}")
        by_url = {document.url: document for document in documents}
        if len(by_url) < len(documents):
            raise ConfigError(f"{where}: {len(documents) - len(by_url)} documents have the address of another one")
        import bm25s

        index = bm25s.BM25()
        index.index(_words([f"{document.title}\n{document.text}" for document in documents]), show_progress=False)
        self._documents, self._by_url, self._index = documents, by_url, index

    def _search(self, query: str, count: int) -> list[Hit]:
        documents, index = self._documents, self._index
        if index is None:
            raise WebFailure("The search is stopped.", "provider")
        words = _words([query])
        if not words[0]:
            return []
        numbers, scores = index.retrieve(words, k=min(count, len(documents)), show_progress=False)
        return [
            Hit(documents[number].title, documents[number].url, _excerpt(documents[number].text, set(words[0])))
            for number, score in zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
            if score > 0
        ]


def _words(texts: list[str]) -> list[list[str]]:
    import bm25s

    words: list[list[str]] = bm25s.tokenize(texts, stopwords=None, return_ids=False, show_progress=False)
    return words


def _excerpt(text: str, words: set[str]) -> str:
    """The text from shortly before the first word that was looked for."""
    lower = text.lower()
    places = [place for word in words if (place := lower.find(word)) >= 0]
    start = max(0, min(places, default=0) - EXCERPT_CHARACTERS // 4)
    return ("... " if start else "") + text[start : start + EXCERPT_CHARACTERS]


def _documents(folder: Path) -> Iterator[Document]:
    """Every document, in the order of their paths.

    Raises:
        ValueError: A row is no document; names file and line.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        if path.suffix.lower() in PLAIN_SUFFIXES:
            text = path.read_text(errors="replace")
            yield Document(_title(text) or path.stem, SCHEME + name, text)
        elif path.suffix.lower() == ROWS_SUFFIX:
            with path.open(errors="replace") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _row(line, name, number)


def _row(line: str, name: str, number: int) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{name}, line {number}: no JSON: {error}") from None
    text = (
        next((row[key] for key in ("text", "contents") if isinstance(row.get(key), str)), None)
        if isinstance(row, dict)
        else None
    )
    if text is None:
        raise ValueError(f"{name}, line {number}: a row needs `text` or `contents`")
    text = _sound(text)
    title = _sound(str(row.get("title") or "")) or _title(text) or f"{name}, {number}"
    return Document(title, str(row.get("url") or f"{SCHEME}{name}/{row.get('id', number)}"), text)


def _title(text: str) -> str:
    """The first line, as Markdown and many corpora have it."""
    return text.lstrip().partition("\n")[0].strip('# \t"')[:120]


def _sound(text: str) -> str:
    """Without lone surrogates, which JSON can hold."""
    return text.encode("utf-8", "replace").decode()
