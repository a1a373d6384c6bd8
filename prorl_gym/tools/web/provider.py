"""What a search provider is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hit:
    """One result.

    Attributes:
        url: What web_fetch takes.
        excerpt: Some of its text, in one line.
    """

    title: str
    url: str
    excerpt: str


class SearchProvider(ABC):
    """Finds pages. One instance serves all jobs at once."""

    async def start(self) -> None:
        """Once, before the first search.

        Raises:
            ConfigError: It cannot work as configured; says what helps.
        """

    async def stop(self) -> None:
        """Once, after the last; idempotent."""

    @abstractmethod
    async def search(self, query: str, count: int) -> list[Hit]:
        """The `count` best matches at most; empty only when the search itself worked and found nothing.

        Raises:
            WebFailure: It did not work.
        """

    def read(self, url: str) -> str | None:
        """The text of a document of the provider's own; None when pages are fetched from the web.

        Raises:
            WebFailure: There is no such document.
        """
        return None
