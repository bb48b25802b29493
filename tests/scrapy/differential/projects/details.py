"""A Spider with xpath, follow, meta, cb_kwargs and errbacks."""

import json

from scrapy.spidermiddlewares.httperror import HttpError

import scrapy


class DetailsSpider(scrapy.Spider):
    name = "details"
    handle_httpstatus_list = [410]
    custom_settings = {
        "LOG_LEVEL": "ERROR", "RETRY_TIMES": 1, "DEFAULT_REQUEST_HEADERS": {"X-Project": "details", "Accept": "text/x"},
        "USER_AGENT": "details/1.0",
    }  # fmt: skip

    def __init__(self, site="", pages="2", **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [f"{site}/category/1", f"{site}/category/2"]
        self.site = site
        self.pages = int(pages)

    def parse(self, response, **kwargs):
        for row in response.xpath('//li[@class="product"]'):
            link = row.xpath("./a/@href").extract_first()
            yield response.follow(
                link, self.parse_item, meta={"price": row.xpath("./span/text()").get(),
                "page": response.meta.get("page", 1)},
                cb_kwargs={"name": row.xpath("normalize-space(a)").get()}, priority=2,
            )  # fmt: skip
        page = response.meta.get("page", 1)
        for following in response.css("a.next"):
            if page < self.pages:
                yield response.follow(following, meta={"page": page + 1})
        if page == 1 and response.url.endswith("/1"):
            yield from self.others(response)

    def others(self, response):
        for path in ("/missing?status=404", "/missing?status=410", "/missing?status=500"):
            yield scrapy.Request(response.urljoin(path), self.parse_status, errback=self.failed)
        yield scrapy.Request(f"{self.site}/flaky", callback=self.parse_status, errback=self.failed, dont_filter=True)
        yield scrapy.Request(f"{self.site}/redirect?to=/item/3", self.parse_redirect)
        yield scrapy.Request(
            f"{self.site}/redirect?to=/item/4", self.parse_redirect,
            meta={"dont_redirect": True, "handle_httpstatus_list": [302]},
        )  # fmt: skip
        yield scrapy.Request("http://127.0.0.1:9/", self.parse_status, errback=self.failed, meta={"dont_retry": True})
        yield scrapy.Request(
            f"{self.site}/echo", self.parse_echo, headers={"Accept-Language": "fr"}, cookies={"a": "1"},
            meta={"cookiejar": "own"},
        )  # fmt: skip
        yield scrapy.Request(
            f"{self.site}/echo?post", self.parse_echo, "POST", body="x=1", headers={"X-Project": "own"}
        )
        yield scrapy.http.JsonRequest(f"{self.site}/api?page=1", data={"b": 1, "a": [2]}, callback=self.parse_api)
        yield from response.follow_all(css="nav a[href*=category]", callback=self.parse_title)
        yield from response.follow_all(["/about/", "/category/1?page=1"], self.parse_title, cb_kwargs={"extra": True})

    def parse_item(self, response, name):
        yield {
            "name": name, "meta": response.meta["price"], "page": response.meta["page"],
            "depth": response.meta["depth"],
            "url": response.url, "tags": [tag.strip() for tag in response.css(".tags li::text").extract()],
            "weight": response.xpath("//p/text()").re_first(r"Weight: (\d+)"),
            "html": response.xpath('//p[@class="price"]').get(),
            "related": response.css("a.related::attr(href)").getall(), "attrib": response.css("h1").attrib,
            "string": response.xpath("string(//div)").get(), "count": response.xpath("count(//a)").get(),
            "join": response.urljoin("x?y"), "encoding": response.encoding,
            "type": response.headers["Content-Type"].decode(), "class": type(response).__name__,
        }  # fmt: skip

    def parse_status(self, response):
        yield {"status": response.status, "url": response.url, "title": response.css("h1::text").get()}

    def parse_redirect(self, response):
        yield {
            "url": response.url, "status": response.status, "redirects": response.meta.get("redirect_urls"),
            "location": (response.headers.get("Location") or b"").decode(), "asked": response.request.url,
        }  # fmt: skip

    def parse_echo(self, response):
        yield {"echo": json.loads(response.text), "json": response.json()["method"]}

    def parse_api(self, response):
        data = response.json()
        yield {"sent": data["sent"], "ids": [each["id"] for each in data["items"]]}
        if data["next"]:
            yield response.request.replace(url=f"{self.site}/api?page={data['next']}", method="GET", body=b"")

    def parse_title(self, response, extra=False):
        return {"title": response.css("title::text").get(), "extra": extra, "referer": response.url}

    def failed(self, failure):
        if failure.check(HttpError):
            response = failure.value.response
            yield {"failed": failure.request.url, "status": response.status, "kind": failure.type.__name__}
        else:
            yield {"failed": failure.request.url, "status": None}
