"""Start requests of both kinds, in order, and priorities."""

import scrapy


class StartsSpider(scrapy.Spider):
    name = "starts"
    custom_settings = {"LOG_LEVEL": "ERROR", "CONCURRENT_REQUESTS": 1}

    def __init__(self, site="", **kwargs):
        super().__init__(**kwargs)
        self.site = site

    def start_requests(self):
        for number in range(1, 4):
            yield scrapy.Request(f"{self.site}/item/{number}", callback=self.parse_item, cb_kwargs={"number": number})
        yield scrapy.Request(f"{self.site}/category/1", callback=self.parse, dont_filter=True)

    async def start(self):
        for request in self.start_requests():
            yield request

    async def parse(self, response):
        for number, priority in ((10, 1), (11, 5), (12, -3), (13, 9)):
            yield scrapy.Request(
                f"{self.site}/item/{number}", self.parse_item, priority=priority, cb_kwargs={"number": number}
            )

    def parse_item(self, response, number):
        yield {"number": number, "depth": response.meta["depth"]}
