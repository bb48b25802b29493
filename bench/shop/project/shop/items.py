from itemloaders.processors import Join, MapCompose, TakeFirst

from scrapy import Field, Item


def number(text):
    return float(text)


class Product(Item):
    url = Field(output_processor=TakeFirst())
    id = Field(input_processor=MapCompose(int), output_processor=TakeFirst())
    name = Field(input_processor=MapCompose(str.strip), output_processor=TakeFirst())
    price = Field(input_processor=MapCompose(number), output_processor=TakeFirst())
    stock = Field(input_processor=MapCompose(int), output_processor=TakeFirst())
    tags = Field(input_processor=MapCompose(str.strip))
    description = Field(input_processor=MapCompose(str.strip), output_processor=Join("\n"))
    gross = Field()
