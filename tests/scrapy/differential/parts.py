"""Small cases for link extractors, forms, items, loaders and feeds. Both Scrapy and Shoal run this file.

It prints one JSON object: what each case returned, or the type of its error.
"""

import copy
import datetime
import io
import json
import re
import warnings
from decimal import Decimal

from itemadapter import ItemAdapter
from itemloaders.processors import Compose, Identity, Join, MapCompose, SelectJmes, TakeFirst
from scrapy.exporters import (
    CsvItemExporter,
    JsonItemExporter,
    JsonLinesItemExporter,
    PprintItemExporter,
    XmlItemExporter,
)
from scrapy.http import HtmlResponse, TextResponse, XmlResponse
from scrapy.link import Link
from scrapy.linkextractors import LinkExtractor
from scrapy.linkextractors.lxmlhtml import LxmlLinkExtractor
from scrapy.loader import ItemLoader
from scrapy.spiders import CSVFeedSpider, XMLFeedSpider

from scrapy import Field, FormRequest, Item, Selector

warnings.simplefilter("ignore")
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


PAGE = """<!doctype html><html><head><title>T</title><link href="/style.css" rel="stylesheet"></head><body>
<div id="nav"><a href="/a">A <b>bold</b>
</a> <a href=" /b \n">B</a> <a href="/a#top">A top</a> <a href="">Self</a></div>
<map><area href="/area?x=1&amp;y=2"></map> <a>No href</a> <a name="x" href="#frag">Frag</a> <a href="?q=1">Query</a>
<ul class="list main"><li><a href="item/1" rel="nofollow me">One</a><li><a href="./item/2" rel="Follow">Two</a>
<li><a href="../item/3">Three</a><li><a href="//other.example.com/x">Other</a><li>
<a href="http://EXAMPLE.com/Up">Up</a></ul>
<a href="mailto:a@b.c">Mail</a> <a href="javascript:go('/js/page')">Script</a> <a href="tel:1">Tel</a>
<a href="/doc.PDF">Pdf</a> <a href="/doc.pdf?x=1">Pdf 2</a> <a href="/x.tar.gz">Tar</a>
<a href="/page.html#doc.pdf">Html</a>
<a href="https://shop.example.org:8080/p">Port</a> <a href="http://sub.example.org/p">Sub</a>
<img src="/pic.png"><script src="/app.js"></script><iframe src="/frame"></iframe> <a href="/a">A again</a>
<a href="/sp ace?q=a b&amp;c=d">Space</a> <a href="/caf\u00e9?q=\u00fc">Umlaut</a>
<a data-href="/data" href="/own">Data</a>
<a href="http://[::1/x">Broken</a>
</body></html>"""
BASE = PAGE.replace("<title>", '<base href="http://base.example.net/dir/"><title>')


def html(text=PAGE, url="http://example.com/dir/page?old=1", **options):
    return HtmlResponse(url, body=text.encode(options.get("encoding", "utf-8")), **{"encoding": "utf-8", **options})


def found(links):
    return [[link.url, link.text, link.fragment, link.nofollow] for link in links]


EXTRACTORS = {
    "plain": {},
    "allow": {"allow": r"/item/\d"},
    "allow several": {"allow": (r"/item/1$", re.compile(r"/B|/b"))},
    "deny": {"deny": [r"item", r"\?"]},
    "allow and deny": {"allow": "item", "deny": "2"},
    "domains": {"allow_domains": "example.org"},
    "domain with a port": {"allow_domains": ["shop.example.org:8080", "EXAMPLE.com"]},
    "denied domains": {"deny_domains": ["example.com"]},
    "no denied extensions": {"deny_extensions": []},
    "own extensions": {"deny_extensions": ["html", "gz"]},
    "xpaths": {"restrict_xpaths": '//ul[@class="list main"]'},
    "xpaths several": {"restrict_xpaths": ["//ul/li[1]", '//div[@id="nav"]', "//ul"]},
    "xpath of the link itself": {"restrict_xpaths": '//a[text()="Two"]'},
    "css": {"restrict_css": "ul.list > li, #nav"},
    "css and xpath": {"restrict_css": "ul", "restrict_xpaths": "//div"},
    "text": {"restrict_text": r"^T"},
    "texts": {"restrict_text": ["One", re.compile("bold")]},
    "tags": {"tags": "area"},
    "attrs": {"tags": ("img", "script", "iframe", "a"), "attrs": ("src", "data-href"), "deny_extensions": ()},
    "both attributes": {"attrs": ["href", "data-href"]},
    "all tags": {"tags": "*", "deny_tags": ["a"]},
    "all attributes": {"tags": "a", "attrs": "*", "deny_attrs": "href"},
    "no tags": {"tags": ()},
    "canonicalize": {"canonicalize": True},
    "not unique": {"unique": False},
    "process value": {"process_value": lambda value: m[1] if (m := re.search(r"go\('(.*?)'", value)) else None},
    "process changes": {"process_value": lambda value: value.replace("item", "thing")},
    "not stripped": {"strip": False, "allow": "b"},
    "none": {"allow": None, "deny": None, "allow_domains": None, "restrict_xpaths": None},
}
for label, arguments in EXTRACTORS.items():
    CASES[f"links: {label}"] = lambda arguments=arguments: found(LinkExtractor(**arguments).extract_links(html()))
    CASES[f"links with base: {label}"] = lambda arguments=arguments: found(
        LinkExtractor(**arguments).extract_links(html(BASE))
    )


@case
def links_by_position():
    return found(LxmlLinkExtractor(r"item", r"2").extract_links(html()))


@case
def links_of_the_same_extractor_on_two_pages():
    extractor = LinkExtractor(allow=r"item|q=")
    return [
        found(extractor.extract_links(html(url=url))) for url in ("http://example.com/x/y/z", "http://example.com/k?m")
    ]


@case
def links_in_another_encoding():
    return found(LinkExtractor(allow="caf|sp").extract_links(html(encoding="iso-8859-1")))


@case
def links_match():
    extractor = LinkExtractor(allow="item", deny="2", allow_domains="example.com")
    return [
        extractor.matches(f"http://{each}") for each in ("example.com/item/1", "example.com/item/2", "x.com/item/1")
    ]


@case
def links_have_values():
    link = Link("http://a/b", "text", "frag", True)
    link.url = "http://a/c"
    return [
        link == Link("http://a/c", "text", "frag", True),
        link != Link("http://a/c"),
        len({link, copy.copy(link)}),
        repr(link),
    ]


@case
def links_follow():
    response = html()
    links = LinkExtractor(allow="item").extract_links(response)
    return [request.url for request in response.follow_all(links)] + [response.follow(links[0]).url]


FORMS = """<html><body><form action="/search?keep=1" id="first"><input name="q" value="1">
<input type="submit" name="go" value="Go">
<input type="image" name="img" src="x"></form>
<form name="second" method="POST" action=" post/here "><input name="text" value="a&amp;b"><input name="empty">
<input value="unnamed">
<input type="hidden" name="h" value="\u00e9"><input type="checkbox" name="c1" value="v" checked>
<input type="checkbox" name="c2" checked>
<input type="checkbox" name="c3"><input type="radio" name="r" value="1">
<input type="radio" name="r" value="2" checked>
<input type="RADIO" name="R" value="9"><input type="reset" name="reset" value="x">
<input type="Submit" name="s1" value="First">
<input type="submit" name="s2" value="Second"><button name="b" value="B">Press</button>
<button type="button" name="no">N</button>
<textarea name="area">Text &lt;b&gt;</textarea><select name="one"><option value="1">A</option>
<option selected>B </option></select>
<select name="none"><option value="x">X</option><option>Y</option></select><select name="void"></select>
<select name="many" multiple><option value="1" selected>1<option value="2">2<option value="3" selected>3</select>
<select name="manynone" multiple><option value="1">1</select><input name="d" value="dis" disabled>
<input type="file" name="f">
<input type="password" name="p" value="pw"></form>
<form method="put" id="third"><div class="in"><input name="x" value="1"><input name="x" value="2"></div></form>
<div class="out"></div>
<table><tr><td><form action="/t"><input name="cell" value="1"></form></td></tr></table>
</body></html>"""
FORM_CASES = {
    "default": {},
    "data": {"formdata": {"q": "2", "new": "3"}},
    "by name": {"formname": "second"},
    "by name that is missing": {"formname": "nothing", "formnumber": 1},
    "by id": {"formid": "third"},
    "by number": {"formnumber": 1, "formdata": [("text", "x"), ("text", "y")]},
    "last": {"formnumber": -1},
    "number too large": {"formnumber": 10},
    "none leaves out": {"formname": "second", "formdata": {"text": None, "c1": None, "one": "2", "many": ["5", "6"]}},
    "click by name": {"formname": "second", "clickdata": {"name": "s2"}},
    "click by value": {"formname": "second", "clickdata": {"type": "submit", "value": "Second"}},
    "click by number": {"formname": "second", "clickdata": {"nr": 1}},
    "click nothing": {"formname": "second", "clickdata": {"name": "zzz"}},
    "click is not clear": {"formid": "first", "clickdata": {"src": "x", "name": "other"}},
    "no click": {"formname": "second", "dont_click": True},
    "click that is in the data": {"formid": "first", "formdata": {"go": "mine"}},
    "xpath": {"formxpath": '//div[@class="in"]/input'},
    "xpath outside": {"formxpath": '//div[@class="out"]'},
    "css": {"formcss": ".in"},
    "css missing": {"formcss": ".missing"},
    "url and method": {"formname": "second", "url": "/else", "method": "get"},
    "method post": {"formid": "first", "method": "POST"},
    "headers and meta": {
        "formname": "second",
        "headers": {"A": "1"},
        "meta": {"k": 1},
        "priority": 3,
        "dont_filter": True,
    },
    "bad data": {"formdata": ["abc"]},
}


def sent(request):
    kind = request.headers.get("Content-Type")
    return [request.url, request.method, request.body.decode(), kind and kind.decode(), request.meta, request.priority]


for label, arguments in FORM_CASES.items():
    CASES[f"form: {label}"] = lambda arguments=arguments: sent(FormRequest.from_response(html(FORMS), **arguments))


@case
def form_in_another_encoding():
    return sent(FormRequest.from_response(html(FORMS, encoding="iso-8859-1"), formname="second", dont_click=True))


@case
def form_with_a_base():
    return sent(FormRequest.from_response(html("<base href='http://b.example/x/'>" + FORMS), formname="second"))


@case
def page_without_a_form():
    return sent(FormRequest.from_response(html("<p>")))


@case
def form_requests():
    url = "http://a.example/p?x=1"
    given = [
        FormRequest(url), FormRequest(url, formdata={"a": "1", "b": ["2", "3"]}), FormRequest(url,
        formdata=[("a", "\u00e9")]),
        FormRequest(url, method="GET", formdata={"q": "a b"}), FormRequest(url, method="PUT", formdata={"q": "x"}),
        FormRequest(url, formdata={}), FormRequest(url, formdata={"a": "\u00e9"}, encoding="latin-1"),
        FormRequest(url, formdata={"a": "1"}, headers={"Content-Type": "text/own"}),
    ]  # fmt: skip
    return [sent(each) for each in given] + [sent(given[1].replace(url="http://a.example/q"))]


class Base(Item):
    name = Field()
    price = Field(serializer=str)


class Product(Base):
    stock = Field(input_processor=MapCompose(int), output_processor=TakeFirst())
    price = Field(unit="EUR")
    kind = "constant"

    def total(self):
        return self["price"] * 2


@case
def items_have_fields():
    item = Product(name="x", price=3)
    item["stock"] = 1
    return [
        dict(item), list(Product.fields), Product.fields["price"], len(item), "name" in item, item.get("none", 4),
        item.total(), item.kind, sorted(item.keys()), item == Product(name="x", price=3, stock=1),
        item == {"name": "x"},
        repr(item), isinstance(item, dict), item.copy() == item, list(Base.fields), bool(Product()),
        item.pop("stock"), dict(item),
    ]  # fmt: skip


@case
def items_copy():
    item = Product(name=["x"])
    shallow, deep = item.copy(), item.deepcopy()
    item["name"].append("y")
    item["price"] = 1
    return [dict(shallow), dict(deep), type(deep).__name__]


@case
def items_refuse_other_fields():
    item = Product()
    errors = []
    for act in (
        lambda: item.__setitem__("other", 1), lambda: item["name"], lambda: Product(other=1), lambda: item.name,
        lambda: setattr(item, "name", 1), lambda: item.update(other=2), lambda: item.missing,
    ):  # fmt: skip
        try:
            act()
            errors.append(None)
        except Exception as exc:
            errors.append(type(exc).__name__)
    return errors


@case
def items_with_adapters():
    item = Product(name="x")
    adapter = ItemAdapter(item)
    adapter["price"] = 2
    return [
        ItemAdapter.is_item(item), list(adapter.field_names()), adapter.asdict(), dict(adapter.get_field_meta("price")),
        item["price"], adapter.item is item,
    ]  # fmt: skip


LOADED = html(
    "<h1> Title </h1><p class=price>Price 12 EUR</p><p class=price>13</p><ul><li>a<li>b</ul><div><b>in</b></div>"
)


class Loader(ItemLoader):
    default_item_class = dict
    default_output_processor = TakeFirst()
    title_in = MapCompose(str.strip, str.upper)
    tags_out = Join("-")
    all_out = Identity()

    def price_in(self, values):
        return [value.replace("Price ", "") for value in values]


@case
def loaders():
    loader = Loader(response=LOADED)
    loader.add_css("title", "h1::text").add_xpath("price", "//p/text()").add_css("tags", "li::text")
    loader.add_value("all", [1, 2]).add_value(None, {"x": "y"}).add_value("none", None)
    loader.add_css("number", "p::text", re=r"(\d+)").add_xpath("none2", "//nothing/text()")
    loader.add_xpath("several", ["//h1/text()", "//li/text()"], str.strip if False else Compose(Join(",")))
    loader.nested_css("div").add_xpath("nested", "./b/text()")
    loader.nested_xpath("//ul").add_css("nested2", "li:nth-child(2)::text")
    loader.add_xpath("variable", "//p[@class=$kind]/text()", kind="price")
    loader.replace_value("x", "z")
    loader.replace_css("all", "li::text")
    collected = [
        loader.get_css("h1::text"),
        loader.get_xpath("//b/text()", TakeFirst()),
        loader.get_output_value("title"),
    ]
    return [loader.load_item(), collected, loader.get_collected_values("tags")]


@case
def loaders_of_items():
    loader = ItemLoader(item=Product(name="first"), selector=Selector(text="<b>7</b>"))
    loader.add_css("stock", "b::text")
    loader.add_value("price", "3", lambda values: [float(value) for value in values])
    item = loader.load_item()
    return [dict(item), type(item).__name__]


@case
def loaders_refuse_unknown_fields():
    loader = ItemLoader(item=Product(), response=LOADED)
    loader.add_value("other", 1)
    return loader.load_item()


@case
def loader_contexts():
    def scaled(value, loader_context):
        return float(value) * loader_context["factor"]

    loader = ItemLoader(item={}, response=LOADED, factor=3)
    loader.add_css("price", "p::text", MapCompose(scaled), re=r"\d+")
    loader.add_value("data", ['{"a": {"b": 1}}'], TakeFirst(), json.loads, SelectJmes("a.b"))
    return [loader.load_item(), loader.context["response"] is LOADED]


FEED = """<?xml version="1.0"?><rss xmlns:m="urn:m" xmlns:unused="urn:u"><channel><title>Top</title>
<item n="1"><title>One</title><m:price>5</m:price><sub><title>Inner</title></sub></item><item n="2"><title>
<![CDATA[T & 2]]></title></item>
<m:item><m:price>8</m:price></m:item></channel></rss>"""


class Feed(XMLFeedSpider):
    name = "feed"
    namespaces = [("x", "urn:m")]

    def parse_node(self, response, node):
        yield {
            "n": node.xpath("@n").get(), "titles": node.xpath("//title/text()").getall(),
            "title": node.xpath("title/text()").get(), "price": node.xpath("x:price/text()").get(),
        }  # fmt: skip


for iterator in ("iternodes", "xml", "html", "other"):
    for tag in ("item", "m:item", "x:item", "nothing"):
        if iterator == "xml" and tag == "m:item":
            continue  # a prefix that is not registered is an error in lxml; here it stands for itself
        if iterator == "other" and tag != "item":
            continue
        if iterator == "html" and tag != "nothing":
            continue  # HTML has no namespaces; here a prefix matches them all the same

        def nodes(iterator=iterator, tag=tag):
            spider = Feed(iterator=iterator, itertag=tag)
            return list(spider._parse(XmlResponse("http://a/f.xml", body=FEED.encode())))

        CASES[f"feed: {iterator} {tag}"] = nodes


@case
def feed_as_html():
    class Titles(Feed):
        def parse_node(self, response, node):
            return {"title": node.xpath("title/text()").get(), "all": len(node.xpath("//title"))}

    return list(Titles(iterator="html")._parse(XmlResponse("http://a/f.xml", body=FEED.encode())))


@case
def feed_rows():
    class Rows(CSVFeedSpider):
        name = "rows"

        def parse_row(self, response, row):
            return row

    def rows(text, **options):
        return list(Rows(**options)._parse(TextResponse("http://a/x.csv", body=text.encode(), encoding="utf-8")))

    return [
        rows("a,b\n1,2\n\n3\n'4','5'\n"), rows("1;2\n", delimiter=";", headers=["x", "y"]),
        rows("a,b\n'1,0',2\n", quotechar="'"),
        rows(""), rows('a,b\n"x\ny",2\n'),
    ]  # fmt: skip


class Priced(Item):
    name = Field()
    price = Field(serializer=lambda value: f"{value} EUR")
    tags = Field()
    more = Field()


EXPORTED = [
    Priced(price=3, name="caf\u00e9 <1>", tags=["a", "b"]),
    Priced(name="two", more={"x": 1, "y": [1, 2]}, tags=[1, "c"]),
    Priced(name=None, price=1),
]
DICTS = [{"a": 1, "b": "x,y", "when": datetime.date(2020, 1, 2)}, {"b": "z", "c": {1}, "d": Decimal("1.50")}]
EXPORTERS = {
    "lines": (JsonLinesItemExporter, {}),
    "lines in UTF-8": (JsonLinesItemExporter, {"encoding": "utf-8", "fields_to_export": ["price", "name"]}),
    "lines with empty fields": (JsonLinesItemExporter, {"export_empty_fields": True, "sort_keys": True}),
    "json": (JsonItemExporter, {}),
    "json lines": (JsonItemExporter, {"indent": 0}),
    "json indented": (JsonItemExporter, {"indent": 2, "encoding": "utf-8"}),
    "json renamed": (JsonItemExporter, {"fields_to_export": {"name": "Name", "more": "More"}}),
    "csv": (CsvItemExporter, {}),
    "csv chosen": (CsvItemExporter, {"fields_to_export": ["tags", "name", "nothing"], "join_multivalued": "|"}),
    "csv renamed": (CsvItemExporter, {"fields_to_export": {"price": "Price"}, "delimiter": ";"}),
    "csv without header": (CsvItemExporter, {"include_headers_line": False, "fields_to_export": ["name"]}),
    "xml": (XmlItemExporter, {}),
    "xml indented": (XmlItemExporter, {"indent": 2, "item_element": "product", "root_element": "products"}),
    "xml lines": (XmlItemExporter, {"indent": 0, "export_empty_fields": True}),
    "pprint": (PprintItemExporter, {}),
    "unknown option": (PprintItemExporter, {"color": "red"}),
}


def exported(items, kind, options):
    file = io.BytesIO()
    exporter = kind(file, **dict(options))
    exporter.start_exporting()
    for item in items:
        exporter.export_item(item)
    exporter.finish_exporting()
    return file.getvalue().decode()


for label, arguments in EXPORTERS.items():
    CASES[f"export: {label}"] = lambda arguments=arguments: exported(EXPORTED, *arguments)
    CASES[f"export of dicts: {label}"] = lambda arguments=arguments: exported(DICTS, *arguments)


def outcome(function):
    try:
        return function()
    except Exception as exc:
        return f"error: {type(exc).__name__}"


if __name__ == "__main__":
    print(json.dumps({name: outcome(function) for name, function in CASES.items()}))
