"""An ordinary Scrapy project and the shop that it crawls."""
