class AddTax:
    def process_item(self, item, spider):
        item["gross"] = round(item["price"] * 1.19, 2)
        return item
