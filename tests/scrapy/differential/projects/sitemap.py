"""A SitemapSpider that starts at robots.txt."""

from scrapy.spiders import SitemapSpider


class MapSpider(SitemapSpider):
    name = "sitemap"
    custom_settings = {"LOG_LEVEL": "ERROR"}
    sitemap_rules = [(r"/item/.*lang=", "parse_german"), (r"/item/", "parse_item"), ("/about", "parse")]
    sitemap_follow = ["items", "pages"]
    sitemap_alternate_links = True

    def __init__(self, site="", **kwargs):
        super().__init__(**kwargs)
        self.sitemap_urls = [site + "/robots.txt", site + "/maps/plain.xml"]

    def sitemap_filter(self, entries):
        for entry in entries:
            if entry.get("lastmod", "2000") < "2014":
                yield entry

    def parse(self, response):
        yield {"page": response.url}

    def parse_item(self, response):
        yield {"item": response.url, "name": response.css("h1::text").get().strip()}

    def parse_german(self, response):
        yield {"german": response.url}
