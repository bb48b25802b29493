"""Sitemaps: files in which a site lists its URLs.

`SitemapReader` reads one file: a pure function of its bytes. `SitemapSpider` crawls the pages that sitemaps list.
"""

from __future__ import annotations

from shoal.sitemaps.entry import Alternate as Alternate
from shoal.sitemaps.entry import SitemapEntry as SitemapEntry
from shoal.sitemaps.reader import SitemapLimits as SitemapLimits
from shoal.sitemaps.reader import SitemapReader as SitemapReader
from shoal.sitemaps.reader import sitemaps_in_robots as sitemaps_in_robots
