import json

from itemadapter import ItemAdapter
from scrapy.exceptions import DropItem

from shop.items import ShopItem


class DropCheap:
    def process_item(self, item, spider):
        if isinstance(item, ShopItem) and item["price"] < spider.minimum:
            raise DropItem(f"too cheap: {item['name']}")
        return item


class AddTax:
    def __init__(self, tax):
        self.tax = tax

    @classmethod
    def from_crawler(cls, crawler):
        return cls(crawler.settings.getint("TAX"))

    def process_item(self, item, spider):
        adapter = ItemAdapter(item)
        if adapter.get("price"):
            adapter["gross"] = round(adapter["price"] * (100 + self.tax) / 100, 2)
        return item


class Writer:
    def open_spider(self, spider):
        self.file = open(spider.settings.get("WRITER_FILE", "written.jsonl"), "w")  # noqa: SIM115

    def close_spider(self, spider):
        self.file.close()

    def process_item(self, item, spider):
        self.file.write(json.dumps(ItemAdapter(item).asdict()) + "\n")
        return item
