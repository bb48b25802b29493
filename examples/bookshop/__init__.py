"""A small bookshop to crawl: `python -m examples.bookshop`, or `async with Bookshop() as shop` in a test."""

from examples.bookshop.site import BOOKS, CATEGORIES, Book, Bookshop, Visit

__all__ = ["BOOKS", "CATEGORIES", "Book", "Bookshop", "Visit"]
