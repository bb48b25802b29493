from scrapy.linkextractors import LinkExtractor

import scrapy
from shop.items import CategoryItem, ShopItem
from shop.loaders import ShopLoader


class ProductsSpider(scrapy.Spider):
    name = "products"
    minimum = 5
    links = LinkExtractor(allow=r"/item/\d+$")

    @classmethod
    def from_crawler(cls, crawler, *args, **kwargs):
        spider = super().from_crawler(crawler, *args, **kwargs)
        crawler.signals.connect(spider.on_closed, signal=scrapy.signals.spider_closed)
        return spider

    def on_closed(self, spider, reason):
        with open("closed.txt", "a") as file:
            file.write(f"{reason} {self.crawler.stats.get_value('shop/pages')}\n")

    def __init__(self, site="", **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [f"{site}/category/{number}" for number in (1, 2, 3)]
        self.site = site

    def parse(self, response):
        self.crawler.stats.inc_value("shop/pages")
        links = self.links.extract_links(response)
        category = CategoryItem(title=response.css("h1::text").get(), members=[link.text for link in links])
        for link in links:
            yield scrapy.Request(link.url, self.parse_item)
        yield category
        if response.url.endswith("/1"):
            yield scrapy.Request(f"{self.site}/item/8?via=proxy", self.parse_item)
            yield scrapy.Request(
                "http://127.0.0.1:9/x", self.parse_item, meta={"fallback": f"{self.site}/item/9?fallback=1"}
            )
            yield scrapy.Request(f"{self.site}/item/5?again=1", self.parse_item, errback=self.refused)

    def parse_item(self, response):
        loader = ShopLoader(ShopItem(), response)
        loader.add_css("name", "h1.name::text")
        loader.add_xpath("price", "//b/text()")
        loader.add_value("url", response.url)
        loader.add_value("stamp", response.headers["X-Stamp"].decode())
        return loader.load_item()

    def refused(self, failure):
        yield {"refused": failure.request.url, "why": failure.getErrorMessage(), "kind": failure.type.__name__}
