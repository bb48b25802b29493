from scrapy.exceptions import IgnoreRequest
from scrapy.http import HtmlResponse


class Stamp:
    """Headers, requests that are refused, and responses without a download."""

    def process_request(self, request, spider):
        request.headers.setdefault("User-Agent", "rotated/1")
        request.headers["X-Project"] = f"{spider.name}-{spider.settings['BOT_NAME']}"
        if "/item/5" in request.url:
            raise IgnoreRequest("not this one")
        if request.url.endswith("/item/6"):
            return HtmlResponse(
                request.url, body=b"<h1 class='name'>Six</h1><b>600</b>", encoding="utf-8", request=request
            )
        return None

    def process_response(self, request, response, spider):
        response.headers["X-Stamp"] = "stamped"
        return response


class AskAgain:
    """Returns a request instead of a response."""

    def process_response(self, request, response, spider):
        if response.url.endswith("/item/7") and not request.meta.get("asked"):
            return request.replace(dont_filter=True, meta={**request.meta, "asked": True})
        return response

    def process_exception(self, request, exception, spider):
        if request.meta.get("fallback"):
            return request.replace(url=request.meta["fallback"], dont_filter=True)
        return None


class Proxy:
    def __init__(self, settings):
        self.proxy = settings.get("SHOP_PROXY")

    @classmethod
    def from_crawler(cls, crawler):
        return cls(crawler.settings)

    def process_request(self, request, spider):
        if self.proxy and "via=proxy" in request.url:
            request.meta["proxy"] = self.proxy
