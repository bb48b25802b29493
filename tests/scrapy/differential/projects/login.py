"""Forms: a login with cookies, and a search."""

from scrapy.http import FormRequest

import scrapy


class LoginSpider(scrapy.Spider):
    name = "login"
    custom_settings = {"LOG_LEVEL": "ERROR", "USER_AGENT": "login"}

    def __init__(self, site="", **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [site + "/login"]

    def parse(self, response):
        yield FormRequest.from_response(
            response, formname="login", formdata={"user": "anna", "password": "p w"}, callback=self.after_login
        )
        yield FormRequest.from_response(response, formdata={"q": "caf\u00e9 & co"}, callback=self.found)
        yield FormRequest.from_response(
            response, formid="login-form", formdata={"user": None, "token": "x"}, clickdata={"name": "cancel"},
            callback=self.refused, meta={"handle_httpstatus_list": [403]},
        )  # fmt: skip
        yield FormRequest.from_response(
            response, formxpath='//input[@name="token"]', dont_click=True, callback=self.refused,
            meta={"handle_httpstatus_all": True},
        )  # fmt: skip
        yield FormRequest.from_response(
            response, formcss="#login-form", formnumber=7, method="GET", callback=self.found
        )
        yield FormRequest.from_response(
            response, formnumber=1, url="/echo", formdata=[("a", "1"), ("a", "2")], callback=self.echo
        )
        yield FormRequest(response.urljoin("/echo?own"), formdata={"list": ["1", "2"], "x": "y z"}, callback=self.echo)
        yield FormRequest(response.urljoin("/search?old=1"), method="GET", formdata={"q": "new"}, callback=self.found)

    def after_login(self, response):
        yield {"hello": response.css("h1::text").get(), "url": response.url}
        yield response.follow("/account/orders", self.orders)
        yield response.follow("/account/other", self.orders, meta={"cookiejar": "other"})
        yield response.follow("/account/none", self.orders, meta={"dont_merge_cookies": True})

    def orders(self, response):
        yield {"hello": response.css("h1::text").get(), "url": response.url}

    def refused(self, response):
        yield {
            "refused": response.status,
            "body": response.css("p::text").get(),
            "sent": response.request.body.decode(),
        }

    def found(self, response):
        yield {"q": response.css("#q::text").get(), "query": response.css("#query::text").get(), "url": response.url}

    def echo(self, response):
        yield {"body": response.json()["body"], "type": response.json()["headers"]["content-type"]}
