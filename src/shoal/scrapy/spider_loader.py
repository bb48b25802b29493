"""The spiders of a project by name, for programs that run all of them."""

from __future__ import annotations

from typing import Self

from shoal.scrapy.project import spider_classes
from shoal.scrapy.settings import Settings
from shoal.scrapy.spider import Spider


class SpiderLoader:
    """Finds the spiders in SPIDER_MODULES. It imports their modules on first use."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[str, type[Spider]] | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        return cls(settings)

    def _classes(self) -> dict[str, type[Spider]]:
        if self._found is None:
            self._found = spider_classes(self._settings)
        return self._found

    def list(self) -> list[str]:
        """The names of all spiders."""
        return list(self._classes())

    def load(self, spider_name: str) -> type[Spider]:
        """The class of a spider. KeyError if there is none with this name."""
        try:
            return self._classes()[spider_name]
        except KeyError:
            raise KeyError(f"Spider not found: {spider_name}") from None
