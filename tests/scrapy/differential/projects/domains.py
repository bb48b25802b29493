"""Allowed domains as projects write them: with a scheme, a path, a port, or without a dot."""

import scrapy


class DomainsSpider(scrapy.Spider):
    name = "domains"
    custom_settings = {"LOG_LEVEL": "CRITICAL", "USER_AGENT": "domains"}

    def __init__(self, site="", domains="", **kwargs):
        super().__init__(**kwargs)
        self.site = site
        self.allowed_domains = [word or None for word in domains.split(",")]
        self.start_urls = [f"{site}/category/1"]

    def parse(self, response):
        other = self.site.replace("127.0.0.1", "localhost")
        for number, url in enumerate((self.site, other, "http://other.invalid")):
            yield scrapy.Request(f"{url}/item/{number + 1}", self.parse_item)
            yield scrapy.Request(f"{url}/item/{number + 11}", self.parse_item, meta={"allow_offsite": number == 1})
        yield scrapy.Request(f"{other}/item/21", self.parse_item, dont_filter=True)
        yield scrapy.http.JsonRequest(f"{self.site}/api?page=3", callback=self.parse_json)
        yield scrapy.http.JsonRequest(f"{other}/api?page=2", data={"z": 1, "a": None}, callback=self.parse_json)
        yield scrapy.http.JsonRequest(f"{other}/echo?json", method="PUT", data=[1], callback=self.parse_json)

    def parse_item(self, response):
        yield {"item": response.url.partition("/item/")[2]}

    def parse_json(self, response):
        yield {"json": response.json(), "sent": response.request.headers.get("Content-Type").decode()}
