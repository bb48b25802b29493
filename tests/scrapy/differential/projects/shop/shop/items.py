import scrapy


class ShopItem(scrapy.Item):
    name = scrapy.Field()
    price = scrapy.Field()
    gross = scrapy.Field()
    url = scrapy.Field()
    stamp = scrapy.Field(serializer=str.upper)


class CategoryItem(scrapy.Item):
    title = scrapy.Field()
    members = scrapy.Field()
