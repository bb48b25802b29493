"""An XMLFeedSpider."""

from scrapy.spiders import XMLFeedSpider


class FeedSpider(XMLFeedSpider):
    name = "xml_feed"
    custom_settings = {"LOG_LEVEL": "ERROR"}
    namespaces = [("money", "urn:money")]
    itertag = "item"

    def __init__(self, site="", iterator="iternodes", **kwargs):
        super().__init__(**kwargs)
        self.iterator = iterator
        self.start_urls = [site + "/feed/news.xml"]

    def parse_node(self, response, node):
        item = {
            "id": node.xpath("@id").get(), "title": node.xpath("title/text()").get(),
            "price": node.xpath("money:price/text()").get(), "about": node.xpath("description/text()").get(),
            "titles": len(node.xpath("//title")),
        }  # fmt: skip
        return [item, response.follow(node.xpath("link/text()").get(), self.parse_item, cb_kwargs={"id": item["id"]})]

    def process_results(self, response, results):
        return results

    def parse_item(self, response, id):
        return {"page": response.url, "id": id}
