"""Outputs of plugins: the scheme of a URL names the plugin."""

from __future__ import annotations

import inspect
from typing import cast
from urllib.parse import urlsplit

from shoal import plugins
from shoal.config import mask
from shoal.errors import ShoalError, SinkError
from shoal.ports import Sink, SinkOptions


def is_plugged(scheme: str) -> bool:
    """Whether a plugin has this scheme. Nothing is imported."""
    return scheme.lower() in plugins.names("sinks")


def open_plugged(spec: str, options: SinkOptions) -> Sink:
    """Call the plugin. SinkError if it raises anything, or if its sink lacks what the contract asks for."""
    try:
        sink = _plugin_of(spec)(spec, options)
    except ShoalError:
        raise
    except Exception as exc:  # the code of a stranger may raise anything
        raise SinkError(f"the plugin for {mask(spec)} failed: {type(exc).__name__}: {exc}") from exc
    if lack := _lack_of(sink):
        raise SinkError(f"the plugin for {mask(spec)} {lack}: see docs/plugins.md")
    return cast(Sink, sink)


def _lack_of(sink: object) -> str | None:
    """What a sink lacks; None if it has all methods, and ``open`` takes an epoch."""
    for name in ("open", "write", "flush", "close", "count"):
        if not callable(getattr(sink, name, None)):
            return f"has no {name}()"
    try:
        inspect.signature(sink.open).bind(b"", 1)  # type: ignore[attr-defined]
    except TypeError:
        return "has an open() that takes no epoch"
    except ValueError:  # a method without a signature, of an extension in C
        pass
    return None


def plugged_id(spec: str) -> str:
    """What the plugin's ``sink_id`` returns, or the URL without user and password."""
    own = getattr(_plugin_of(spec), "sink_id", None)
    if own is not None:
        return str(own(spec))
    try:
        parts = urlsplit(spec)
    except ValueError:
        raise SinkError(f"invalid {spec.partition(':')[0]}:// output") from None
    return mask(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())


def is_plugged_shared(spec: str) -> bool:
    """Whether workers on any machine can write it: the plugin's ``shared``, by default True."""
    return bool(getattr(_plugin_of(spec), "shared", True))


def _plugin_of(spec: str) -> plugins.Registered:
    scheme = spec.partition(":")[0]
    found = plugins.load("sinks", scheme)
    if found is None:
        raise SinkError(f"unknown output {scheme}://{plugins.hint('sinks')}")
    return found
