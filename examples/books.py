"""The demo: every book of the bookshop, from list pages to detail pages."""

from shoal import Request, Response, Spider


class Books(Spider):
    """The books of the demo shop: title, price, rating, stock."""

    name = "books"
    start_url = "http://127.0.0.1:8000/"  # to change it: -a start_url=...
    settings = {"scope": {"max_depth": 8}}  # the calendar of the shop is endless

    def start(self):
        yield Request(self.start_url)

    def parse(self, response: Response):
        """Follow the books and all other links of a page."""
        yield response.follow_all("article.product h3 a", callback=self.book, priority=10)
        yield response.follow_all("a[href]:not(article.product a)")

    def book(self, response: Response):
        """Yield the book of a detail page."""
        yield {
            "title": response.css("h1::text").get(),
            "price": response.css("p.price::text").re_first(r"[\d.]+"),
            "rating": response.css("p.rating::attr(data-rating)").get(),
            "stock": response.css("p.stock::text").re_first(r"\d+"),
            "category": response.css("a.category::text").get(),
            "url": response.url,
        }
