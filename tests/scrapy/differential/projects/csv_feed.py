"""A CSVFeedSpider."""

from scrapy.spiders import CSVFeedSpider


class RowsSpider(CSVFeedSpider):
    name = "csv_feed"
    custom_settings = {"LOG_LEVEL": "CRITICAL"}
    delimiter = ";"

    def __init__(self, site="", **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [site + "/feed/items.csv"]

    def adapt_response(self, response):
        return response.replace(body=response.body.replace(b"1.50", b"9.99"))

    def parse_row(self, response, row):
        return {**row, "columns": len(row)}
