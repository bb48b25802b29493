BOT_NAME = "shop"
SPIDER_MODULES = ["shop.spiders"]
NEWSPIDER_MODULE = "shop.spiders"
ROBOTSTXT_OBEY = False
LOG_LEVEL = "ERROR"
USER_AGENT = "shop/2.0"
CONCURRENT_REQUESTS_PER_DOMAIN = 4
RETRY_TIMES = 1
ITEM_PIPELINES = {
    "shop.pipelines.Writer": 800,
    "shop.pipelines.DropCheap": 100,
    "shop.pipelines.AddTax": 300,
}
DOWNLOADER_MIDDLEWARES = {
    "shop.middlewares.Stamp": 543,
    "shop.middlewares.AskAgain": 600,
    "shop.middlewares.Proxy": 700,
    "scrapy.downloadermiddlewares.useragent.UserAgentMiddleware": None,
}
TAX = 19
