"""Scrapy's item exporters. Pipelines use them to write files of their own."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pprint import pformat
from typing import Any, BinaryIO, TypedDict, Unpack
from xml.sax.saxutils import XMLGenerator
from xml.sax.xmlreader import AttributesImpl

from itemadapter import ItemAdapter

from shoal.scrapy.http import Request, Response
from shoal.scrapy.item import support_item_adapter
from shoal.scrapy.values import Given

log = logging.getLogger("shoal.scrapy")

support_item_adapter()


class ScrapyJSONEncoder(json.JSONEncoder):
    """Encodes the values of items as JSON: dates, decimals, sets, and nested items."""

    def default(self, o: object) -> object:
        match o:
            case set() | frozenset():
                return list(o)
            case datetime.date() | datetime.time():
                return o.isoformat()
            case decimal.Decimal():
                return str(o)
            case Request():
                return f"<{type(o).__name__} {o.method} {o.url}>"
            case Response():
                return f"<{type(o).__name__} {o.status} {o.url}>"
        return ItemAdapter(o).asdict() if ItemAdapter.is_item(o) else super().default(o)


class ExporterOptions(TypedDict, total=False):
    """The options that every exporter has."""

    encoding: str | None
    fields_to_export: Mapping[str, str] | Iterable[str] | None
    export_empty_fields: bool
    indent: int | None
    dont_fail: bool


class BaseItemExporter:
    """Chooses the fields of an item and serializes them. Subclasses write them with ``export_item``."""

    def __init__(self, *, dont_fail: bool = False, **options: Any) -> None:
        self.encoding: str | None = options.pop("encoding", None)
        self.fields_to_export: Mapping[str, str] | Iterable[str] | None = options.pop("fields_to_export", None)
        self.export_empty_fields: bool = options.pop("export_empty_fields", False)
        self.indent: int | None = options.pop("indent", None)
        self._kwargs = options
        """All other options. They are passed to the library that writes the file."""
        if options and not dont_fail:
            raise TypeError(f"Unexpected options: {', '.join(options)}")

    def export_item(self, item: Any) -> object:
        raise NotImplementedError(f"{type(self).__name__} has no export_item()")

    def start_exporting(self) -> None:
        """Called before the first item."""

    def finish_exporting(self) -> None:
        """Called after the last item."""

    def serialize_field(self, field: Given, name: str, value: Any) -> Any:
        """Return the value to write for a field: the result of its ``serializer``, if it has one."""
        serializer = field.get("serializer")
        return self._serialized(value) if serializer is None else serializer(value)

    def _serialized(self, value: object) -> object:
        return value

    def get_serialized_fields(
        self, item: object, default_value: object = None, include_empty: bool | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield the names and values to write. ``include_empty`` adds the fields that the item does not have."""
        adapter = ItemAdapter(item)
        names = self._names(adapter)
        if not (self.export_empty_fields if include_empty is None else include_empty):
            names = {name: title for name, title in names.items() if name in adapter}
            if self.fields_to_export is None:
                names |= {name: name for name in adapter if name not in names}
        for name, title in names.items():
            if name in adapter:
                yield title, self.serialize_field(adapter.get_field_meta(name), title, adapter[name])
            else:
                yield title, default_value

    def _names(self, adapter: ItemAdapter) -> dict[str, str]:
        """The fields to write, with their names in the output."""
        chosen = self.fields_to_export
        if isinstance(chosen, Mapping):
            return dict(chosen)
        return {name: name for name in (adapter.field_names() if chosen is None else chosen)}


class JsonLinesItemExporter(BaseItemExporter):
    """Writes one JSON object per line."""

    def __init__(self, file: BinaryIO, **options: Any) -> None:
        super().__init__(dont_fail=True, **options)
        self.file = file
        self.encoder = ScrapyJSONEncoder(**{"ensure_ascii": not self.encoding, **self._kwargs})

    def _encoded(self, item: object) -> bytes:
        return self.encoder.encode(dict(self.get_serialized_fields(item))).encode(self.encoding or "utf-8")

    def export_item(self, item: object) -> None:
        self.file.write(self._encoded(item) + b"\n")


class JsonItemExporter(JsonLinesItemExporter):
    """Writes one JSON array."""

    def __init__(self, file: BinaryIO, **options: Any) -> None:
        super().__init__(file, **options)
        self.first_item = True
        self._newline = b"" if self.indent is None else b"\n"
        if self.indent:
            self.encoder = ScrapyJSONEncoder(
                **{"indent": self.indent, "ensure_ascii": not self.encoding, **self._kwargs}
            )

    def start_exporting(self) -> None:
        self.file.write(b"[" + self._newline)

    def export_item(self, item: object) -> None:
        data = self._encoded(item)
        self.file.write(data if self.first_item else b"," + self._newline + data)
        self.first_item = False

    def finish_exporting(self) -> None:
        self.file.write(self._newline + b"]")


class CsvItemExporter(BaseItemExporter):
    """Writes a CSV file. Its columns are ``fields_to_export``, or else the fields of the first item."""

    def __init__(
        self, file: BinaryIO, include_headers_line: bool = True, join_multivalued: str = ",", errors: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(dont_fail=True, **options)
        self.encoding = self.encoding or "utf-8"
        self.include_headers_line = include_headers_line
        self.stream = io.TextIOWrapper(file, self.encoding, errors, newline="", write_through=True)
        self.csv_writer = csv.writer(self.stream, **self._kwargs)
        self._join = join_multivalued
        self._is_first = True
        self._reports_losses = False

    def _serialized(self, value: object) -> object:
        if isinstance(value, list | tuple) and all(isinstance(member, str) for member in value):
            return self._join.join(value)
        return value

    def export_item(self, item: object) -> None:
        if self._is_first and self.include_headers_line:
            self._write_header(item)
        self._is_first = False
        if self._reports_losses and (lost := set(ItemAdapter(item).field_names()) - set(self.fields_to_export or ())):
            self._reports_losses = False
            log.warning("the CSV file has no columns for %s: set fields_to_export", sorted(lost))
        row = self.get_serialized_fields(item, default_value="", include_empty=True)
        self.csv_writer.writerow([self._text(value) for _, value in row])

    def _write_header(self, item: object) -> None:
        if not self.fields_to_export:
            self.fields_to_export = list(ItemAdapter(item).field_names())
            self._reports_losses = True
        chosen = self.fields_to_export
        self.csv_writer.writerow(list(chosen.values() if isinstance(chosen, Mapping) else chosen))

    def _text(self, value: object) -> object:
        return value.decode(self.encoding or "utf-8") if isinstance(value, bytes) else value

    def finish_exporting(self) -> None:
        self.stream.detach()  # the file stays open


class XmlItemExporter(BaseItemExporter):
    """Writes an XML document with one element per item."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        item_element: str = "item",
        root_element: str = "items",
        **options: Unpack[ExporterOptions],
    ) -> None:
        self.item_element = item_element
        self.root_element = root_element
        super().__init__(**options)
        self.encoding = self.encoding or "utf-8"
        self.stream = io.TextIOWrapper(file, self.encoding, "xmlcharrefreplace", newline="\n", write_through=True)
        self.xg = XMLGenerator(self.stream, encoding=self.encoding)

    def start_exporting(self) -> None:
        self.xg.startDocument()
        self._open(self.root_element, 0)
        if self.indent is not None:
            self.xg.characters("\n")

    def export_item(self, item: object) -> None:
        self._open(self.item_element, 1)
        self._break()
        for name, value in self.get_serialized_fields(item, default_value=""):
            self._write(name, value, 2)
        self._close(self.item_element, 1)
        if self.indent is not None:
            self.xg.characters("\n")

    def finish_exporting(self) -> None:
        self.xg.endElement(self.root_element)
        self.xg.endDocument()
        self.stream.detach()  # the file stays open

    def _write(self, name: str, value: object, depth: int) -> None:
        self._open(name, depth)
        parts: Iterable[tuple[str, object]] | None = None
        if hasattr(value, "items"):
            parts = value.items()
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
            parts = (("value", member) for member in value)
        if parts is not None:
            self._break()
            for title, each in parts:
                self._write(title, each, depth + 1)
            self._close(name, depth)
        else:
            self.xg.characters(str(value))
            self.xg.endElement(name)
        self._break()

    def _open(self, name: str, depth: int) -> None:
        self._space(depth)
        self.xg.startElement(name, AttributesImpl({}))

    def _close(self, name: str, depth: int) -> None:
        self._space(depth)
        self.xg.endElement(name)

    def _space(self, depth: int) -> None:
        if self.indent:
            self.xg.characters(" " * self.indent * depth)

    def _break(self) -> None:
        if self.indent:
            self.xg.characters("\n")


class PprintItemExporter(BaseItemExporter):
    """Writes items with ``pprint``."""

    def __init__(self, file: BinaryIO, **options: Unpack[ExporterOptions]) -> None:
        super().__init__(**options)
        self.file = file

    def export_item(self, item: object) -> None:
        self.file.write((pformat(dict(self.get_serialized_fields(item))) + "\n").encode())


class PickleItemExporter(BaseItemExporter):
    """Writes items as dicts with pickle."""

    def __init__(self, file: BinaryIO, protocol: int = 4, **options: Unpack[ExporterOptions]) -> None:
        super().__init__(**options)
        self.file = file
        self.protocol = protocol

    def export_item(self, item: object) -> None:
        pickle.dump(dict(self.get_serialized_fields(item)), self.file, self.protocol)
