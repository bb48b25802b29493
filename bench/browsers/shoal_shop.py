from shoal import Spider


class Shop(Spider):
    name = "shop"
    render = True
    settings = {
        "browser.sandbox": False, "browser.max_pages": 4, "download_delay": 0, "robots.obey": False,
        "throttle.enabled": False, "browser.recycle_pages": 100_000,
    }  # fmt: skip

    def __init__(self, render="all", **arguments):
        super().__init__(**arguments)
        self.render = "auto" if render == "auto" else True

    def parse(self, response):
        yield response.follow_all("a.product", self.product)
        yield response.follow_all("a.next")

    def product(self, response):
        yield {"url": response.url, "name": response.css("h1::text").get()}
