"""Requests and responses: what a spider yields and receives.

The room does no I/O, except that `login.py` reads secrets. It imports `selector` and `urls`. Start with `request.py`
and `response.py`.
"""

from __future__ import annotations

from shoal.http.files import File as File
from shoal.http.rendering import Render as Render
from shoal.http.request import Duplicates as Duplicates
from shoal.http.request import LinkBatch as LinkBatch
from shoal.http.request import Request as Request
from shoal.http.request import callback_name as callback_name
from shoal.http.response import Response as Response
from shoal.http.response import href_of as href_of

__all__ = ["Duplicates", "File", "LinkBatch", "Render", "Request", "Response", "callback_name", "href_of"]
