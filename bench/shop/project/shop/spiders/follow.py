import os

import scrapy
from shop.items import Product


class FollowSpider(scrapy.Spider):
    """Follows links with response.follow, and fills the items by hand."""

    name = "follow"
    start_urls = [os.environ.get("BENCH_URL", "")]

    def parse(self, response):
        for link in response.xpath("//nav//a"):
            yield response.follow(link, self.parse_category)

    def parse_category(self, response):
        category = response.xpath("//h1/text()").get()
        for row in response.xpath('//li[@class="entry"]'):
            yield response.follow(row.xpath("./a/@href").get(), self.parse_product, cb_kwargs={"category": category})
        for link in response.css("a.next"):
            yield response.follow(link, self.parse_category)

    def parse_product(self, response, category):
        box = response.xpath('//div[@class="product"]')
        item = Product()
        item["url"] = response.url
        item["id"] = int(box.xpath("./@data-id").get())
        item["name"] = box.xpath('normalize-space(.//h1[@class="name"])').get()
        item["price"] = float(box.xpath('.//p[@class="price"]/b/text()').get())
        item["stock"] = int(box.xpath('.//p[@class="stock"]/text()').re_first(r"\d+"))
        item["tags"] = [tag.strip() for tag in box.xpath('.//li[@class="tag"]/text()').getall()]
        item["description"] = "\n".join(box.xpath('.//div[@id="description"]/p/text()').getall())
        yield item
        for link in response.css("a.related"):
            yield response.follow(link, self.parse_product, cb_kwargs={"category": category})
