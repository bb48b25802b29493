from itemloaders.processors import MapCompose, TakeFirst
from scrapy.loader import ItemLoader


class ShopLoader(ItemLoader):
    default_output_processor = TakeFirst()
    name_in = MapCompose(str.strip)
    price_in = MapCompose(float)
