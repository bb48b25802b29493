import os

from scrapy.linkextractors import LinkExtractor
from scrapy.loader import ItemLoader
from scrapy.spiders import CrawlSpider, Rule

from shop.items import Product


class RulesSpider(CrawlSpider):
    """Follows all categories and products by rules, and loads the items."""

    name = "rules"
    start_urls = [os.environ.get("BENCH_URL", "")]
    rules = (
        Rule(LinkExtractor(allow=r"/product/\d+\.html"), callback="parse_product", follow=True),
        Rule(LinkExtractor(allow=r"/category/", restrict_css=("nav", "a.next"))),
    )

    def parse_product(self, response):
        loader = ItemLoader(item=Product(), response=response)
        loader.add_value("url", response.url)
        loader.add_css("id", "div.product::attr(data-id)")
        loader.add_css("name", "h1.name::text")
        loader.add_xpath("price", '//p[@class="price"]/b/text()')
        loader.add_css("stock", "p.stock::text", re=r"(\d+)")
        loader.add_css("tags", "ul.tags li::text")
        loader.add_xpath("description", '//div[@id="description"]/p/text()')
        return loader.load_item()
