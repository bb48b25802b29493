"""A CrawlSpider with rules, loaders and the functions that change links, requests and results."""

from itemloaders.processors import Compose, Join, MapCompose, TakeFirst
from scrapy.linkextractors import LinkExtractor
from scrapy.loader import ItemLoader
from scrapy.spiders import CrawlSpider, Rule

import scrapy


def cents(text):
    return round(float(text) * 100)


class Product(scrapy.Item):
    name = scrapy.Field(input_processor=MapCompose(str.strip), output_processor=TakeFirst())
    price = scrapy.Field(input_processor=MapCompose(cents), output_processor=TakeFirst())
    tags = scrapy.Field(input_processor=MapCompose(str.strip, lambda tag: tag or None))
    about = scrapy.Field()
    url = scrapy.Field(output_processor=TakeFirst())
    link_text = scrapy.Field(output_processor=TakeFirst())
    source = scrapy.Field(output_processor=TakeFirst())


class ProductLoader(ItemLoader):
    default_item_class = Product
    about_in = MapCompose(str.strip)
    about_out = Join(" | ")


class RulesSpider(CrawlSpider):
    name = "rules"
    custom_settings = {"LOG_LEVEL": "ERROR"}

    rules = (
        Rule(
            LinkExtractor(allow=r"/item/\d+", deny=r"ref=", restrict_css="ul, a.related"),
            callback="parse_item",
            cb_kwargs={"source": "list"},
            process_links="drop_fragments",
            errback="failed",
        ),
        Rule(
            LinkExtractor(restrict_xpaths='//a[@rel="next"]'),
            callback="parse_category",
            follow=True,
            process_request="mark",
        ),
        Rule(LinkExtractor(allow=(r"/category/", r"/about")), process_request=lambda request, response: request),
        Rule(LinkExtractor(allow=r"/team$"), callback="parse_item", errback="failed"),
    )

    def __init__(self, site=None, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.start_urls = [site + "/"]
        self.allowed_domains = ["127.0.0.1"]

    def parse_start_url(self, response):
        yield {"start": response.url, "links": len(response.css("a"))}

    def drop_fragments(self, links):
        for link in links:
            link.url = link.url.partition("#")[0]
        return links

    def mark(self, request, response):
        request.meta["from"] = response.url
        return request if "page=" in request.url else None

    def process_results(self, response, results):
        for result in results:
            if isinstance(result, Product):
                result["tags"] = sorted(set(result.get("tags", [])))
            yield result

    def parse_item(self, response, source="unknown"):
        loader = ProductLoader(response=response)
        loader.add_css("name", "h1.name::text")
        loader.add_xpath("price", '//p[@class="price"]/b/text()')
        loader.add_css("tags", "ul.tags li::text")
        about = loader.nested_css("#about")
        about.add_xpath("about", "./p[1]/text()")
        about.add_css("about", "p::text", re=r"Weight: (\d+)")
        loader.add_value("url", response.url)
        loader.add_value("link_text", response.meta["link_text"], Compose(TakeFirst(), str.lower))
        loader.add_value("source", source)
        yield loader.load_item()

    def parse_category(self, response):
        return [{"category": response.css("h1::text").get(), "from": response.meta["from"]}]

    def failed(self, failure):
        yield {"failed": failure.request.url, "status": failure.value.response.status}
