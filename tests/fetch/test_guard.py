"""Which addresses the API may contact for its callers, and which a rendered page may contact."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.fetch import guard as guard_module
from shoal.fetch.guard import AddressGuard, PageReach

NOTHING_LISTED = AddressGuard([])
LOOPBACK, PRIVATE, RESERVED = "a loopback address", "a private address", "a reserved address"
LINK_LOCAL, MULTICAST, UNSPECIFIED = "a link-local address", "a multicast address", "the unspecified address"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        # IPv4
        ("127.0.0.1", LOOPBACK),
        ("127.255.255.254", LOOPBACK),
        ("0.0.0.0", UNSPECIFIED),
        ("0.1.2.3", PRIVATE),
        ("10.0.0.1", PRIVATE),
        ("172.16.0.1", PRIVATE),
        ("172.31.255.255", PRIVATE),
        ("192.168.1.1", PRIVATE),
        ("169.254.1.1", LINK_LOCAL),
        ("100.64.0.1", PRIVATE),
        ("100.127.255.255", PRIVATE),
        ("192.0.0.1", RESERVED),
        ("192.0.0.9", RESERVED),
        ("192.0.0.170", RESERVED),
        ("192.0.2.1", PRIVATE),
        ("198.51.100.1", PRIVATE),
        ("203.0.113.1", PRIVATE),
        ("198.18.0.1", PRIVATE),
        ("198.19.255.255", PRIVATE),
        ("192.88.99.1", RESERVED),
        ("224.0.0.1", MULTICAST),
        ("239.255.255.250", MULTICAST),
        ("240.0.0.1", RESERVED),
        ("255.255.255.255", RESERVED),
        # IPv6
        ("::1", LOOPBACK),
        ("0:0:0:0:0:0:0:1", LOOPBACK),
        ("::", UNSPECIFIED),
        ("fe80::1", LINK_LOCAL),
        ("fe80::1%eth0", LINK_LOCAL),
        ("::1%lo", LOOPBACK),
        ("fc00::1", PRIVATE),
        ("fdff:ffff::1", PRIVATE),
        ("fec0::1", RESERVED),
        ("ff02::1", MULTICAST),
        ("ff0e::1", MULTICAST),
        ("2001:db8::1", PRIVATE),
        ("2001:2::1", RESERVED),
        ("3fff::1", RESERVED),
        ("100::1", RESERVED),
        ("5f00::1", RESERVED),
        ("4000::1", RESERVED),
        # IPv4 within IPv6
        ("::ffff:127.0.0.1", LOOPBACK),
        ("::ffff:7f00:1", LOOPBACK),
        ("::FFFF:10.0.0.1", PRIVATE),
        ("::ffff:127.0.0.1%lo", LOOPBACK),
        ("::ffff:0.0.0.0", UNSPECIFIED),
        ("::ffff:169.254.169.254", LINK_LOCAL),
        ("::ffff:0:127.0.0.1", RESERVED),
        ("::127.0.0.1", RESERVED),
        ("::8.8.8.8", RESERVED),
        ("64:ff9b::127.0.0.1", LOOPBACK),
        ("64:ff9b::a9fe:a9fe", LINK_LOCAL),
        ("64:ff9b:1::8.8.8.8", RESERVED),
        ("2002:7f00:1::", RESERVED),
        ("2002:808:808::1", RESERVED),
        ("2001:0:808:808::f7f7:f7f7", RESERVED),
        # metadata of clouds
        ("169.254.169.254", LINK_LOCAL),
        ("169.254.170.2", LINK_LOCAL),
        ("fd00:ec2::254", PRIVATE),
        ("fd20:ce::254", PRIVATE),
        ("fe80::a9fe:a9fe%2", LINK_LOCAL),
        ("100.100.100.200", PRIVATE),
        ("192.0.0.192", RESERVED),
        ("168.63.129.16", RESERVED),
        # what a system may read as an address
        ("127.1", "not an IP address"),
        ("2130706433", "not an IP address"),
        ("0x7f000001", "not an IP address"),
        ("0177.0.0.1", "not an IP address"),
        ("127.0.0.01", "not an IP address"),
        ("[::1]", "not an IP address"),
        ("localhost", "not an IP address"),
        ("", "not an IP address"),
    ],
)
def test_what_is_refused(address: str, reason: str) -> None:
    assert NOTHING_LISTED.refuses(address) == reason


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "1.0.0.1",
        "126.255.255.255",
        "128.0.0.1",
        "172.15.255.255",
        "172.32.0.1",
        "100.63.255.255",
        "100.128.0.1",
        "168.63.129.17",
        "223.255.255.255",
        "2606:4700::1111",
        "2a00:1450:4001::1",
        "2001:4860:4860::8888",
        "2003::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ],
)
def test_what_is_public(address: str) -> None:
    assert NOTHING_LISTED.refuses(address) is None


@pytest.mark.parametrize(
    ("listed", "address", "allowed"),
    [
        ("127.0.0.0/8", "127.9.9.9", True),
        ("127.0.0.0/8", "::ffff:127.0.0.1", True),
        ("127.0.0.0/8", "64:ff9b::127.0.0.1", True),
        ("127.0.0.0/8", "::1", False),
        ("127.0.0.0/8", "10.0.0.1", False),
        ("127.0.0.0/8", "::127.0.0.1", False),
        ("127.0.0.0/8", "2002:7f00:1::", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1/32", "127.0.0.2", False),
        ("::1", "::1", True),
        ("::1", "127.0.0.1", False),
        ("fe80::/10", "fe80::1%eth0", True),
        ("fd00::/8", "fd00:ec2::254", True),
        ("fd00::/8", "fc00::1", False),
        ("2002:7f00:1::/48", "2002:7f00:1::5", True),
        ("64:ff9b::/96", "64:ff9b::10.0.0.1", True),
        ("64:ff9b::/96", "10.0.0.1", False),
        ("::ffff:10.0.0.0/104", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.0/104", "10.0.0.1", False),
        ("0.0.0.0/0", "224.0.0.1", True),
        ("0.0.0.0/0", "127.1", False),
        ("8.8.8.8", "9.9.9.9", True),
    ],
)
def test_what_is_listed(listed: str, address: str, allowed: bool) -> None:
    assert (AddressGuard(["203.0.113.0/24", listed]).refuses(address) is None) is allowed


@pytest.mark.parametrize("text", ["localhost", "10.0.0.0/33", "10.0.0.1/8", "10.0.0.*", "127.1", "", "[::1]", "::1/x"])
def test_what_can_not_be_listed(text: str) -> None:
    with pytest.raises(
        ConfigError, match=rf'^"serve.allow" must have addresses and networks .* not {re.escape(repr(text))}'
    ):
        AddressGuard(["127.0.0.1", text])


@st.composite
def networks(draw: st.DrawFn) -> IPv4Network | IPv6Network:
    address = draw(st.ip_addresses())
    return ip_network(f"{address}/{draw(st.integers(0, address.max_prefixlen))}", strict=False)


@given(networks(), st.data())
def test_whatever_lies_in_a_listed_network_is_allowed(network: IPv4Network | IPv6Network, data: st.DataObject) -> None:
    address = data.draw(st.ip_addresses(network=network))
    assert AddressGuard([str(network)]).refuses(str(address)) is None


@given(st.ip_addresses(), networks())
def test_a_listed_network_opens_nothing_beside_it(address: object, network: IPv4Network | IPv6Network) -> None:
    found = ip_address(str(address))
    within = [found, IPv4Address(int(found) & 0xFFFFFFFF)]
    assume(not any(each in network for each in within))
    assert AddressGuard([str(network)]).refuses(str(found)) == NOTHING_LISTED.refuses(str(found))


@given(st.ip_addresses())
def test_whatever_is_not_global_is_refused(address: object) -> None:
    """Hypothesis likes the special networks."""
    found = ip_address(str(address))
    # The same address as IPv4 is judged, whatever a version of Python thinks of its other spelling.
    found = getattr(found, "ipv4_mapped", None) or found
    assume(not found.is_global or found.is_multicast)
    assert NOTHING_LISTED.refuses(str(found)) is not None


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_alike_in_ipv6(address: IPv4Address) -> None:
    reason = NOTHING_LISTED.refuses(str(address))
    assert NOTHING_LISTED.refuses(f"::ffff:{address}") == reason
    assert NOTHING_LISTED.refuses(f"64:ff9b::{address}") == reason


# -- names, for proxies that resolve them


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", LOOPBACK),
        ("10.0.0.1", PRIVATE),
        ("::ffff:127.0.0.1", LOOPBACK),
        ("64:ff9b::a00:1", PRIVATE),
        *((host, "not a host name") for host in (
            "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7F.1", "0x", "0177.0.0.1", "017700000001", "127.0.0.1.",
            "127.0.0.1..", "1.2.3.4.5", "8.8.8.08", "999999999999", "a.1", "", ".", "..", "a..example", ".example",
            "a b.example", "a%2eexample", "[::1]", "①②⑦.⓪.⓪.①", "b\u00fccher.example", "user@a.example", "a.example:80",
            "xn--orhcp.example", "xn--\u00fc.example",
        )),
        *((host, "a name of a local network") for host in (
            "localhost", "LOCALHOST.", "a.localhost", "printer", "nas.local", "metadata.google.internal", "x.home.arpa",
            "wiki.corp", "ip6-localhost", "localhost.localdomain",
        )),
    ],
)  # fmt: skip
def test_what_no_proxy_is_asked_for(host: str, reason: str) -> None:
    assert NOTHING_LISTED.refuses_host(host) == reason


@pytest.mark.parametrize(
    "host",
    ["8.8.8.8", "2606:4700::1111", "shop.example", "SHOP.example.", "a-b_c.example", "xn--bcher-kva.example",
     "1.example", "2gyzjbc7fufpcf.onion", "0x.example", "127.0.0.1.example", "local.example"],
)  # fmt: skip
def test_what_a_proxy_may_be_asked_for(host: str) -> None:
    assert NOTHING_LISTED.refuses_host(host) is None


def test_listed_addresses_may_be_asked_for() -> None:
    assert AddressGuard(["127.0.0.0/8"]).refuses_host("127.0.0.1") is None
    assert AddressGuard(["127.0.0.0/8"]).refuses_host("127.1") == "not a host name"


# -- names with several addresses

PUBLIC, OTHER_PUBLIC, PUBLIC_6 = "8.8.8.8", "9.9.9.9", "2606:4700::1111"


@pytest.mark.parametrize(
    ("answer", "selected"),
    [
        ([PUBLIC, "127.0.0.1", PUBLIC_6], [PUBLIC, PUBLIC_6]),
        (["10.0.0.1", "127.0.0.1"], ["10.0.0.1"]),
        (["10.0.0.1", PUBLIC], [PUBLIC]),  # although it is listed
        (["127.0.0.1"], []),
    ],
)
def test_which_addresses_of_a_name_are_used(answer: list[str], selected: list[str]) -> None:
    assert AddressGuard(["10.0.0.0/8"]).select(answer) == selected


# -- what a page may contact


def test_a_page_from_a_public_address_reaches_public_addresses_only() -> None:
    reach = PageReach(None)
    assert reach.select("a.example", [PUBLIC, "10.0.0.1"]).addresses == [PUBLIC]
    assert reach.select("b.example", [OTHER_PUBLIC]).addresses == [OTHER_PUBLIC]
    for host, address in [("b.example", "10.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("c.example", "odd")]:
        refused = reach.select(host, [address])
        assert refused.addresses == []
        assert refused.refusal.endswith(", which only pages from local addresses may contact (browser.public_networks)")


def test_a_page_from_a_local_address_reaches_all_addresses() -> None:
    reach = PageReach(None)
    for host, address in [("wiki", "10.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("a.example", PUBLIC), ("nas", "fd00::1")]:
        assert reach.select(host, [address]).addresses == [address]


def test_the_guard_refuses_in_any_case_and_decides_nothing_about_the_page() -> None:
    reach = PageReach(AddressGuard(["10.0.0.0/8"]))
    refused = reach.select("a.example", ["127.0.0.1", "192.168.0.1"])
    assert refused == ([], "is a loopback address, which may not be contacted (serve.allow)")
    assert reach.select("a.example", ["10.0.0.1", "127.0.0.1"]).addresses == ["10.0.0.1"]
    assert reach.select("b.example", ["127.0.0.1"]).addresses == []
    assert reach.select("b.example", [PUBLIC]).addresses == [PUBLIC]


def test_a_listed_network_is_not_for_pages_from_public_addresses() -> None:
    reach = PageReach(AddressGuard(["10.0.0.0/8"]))
    assert reach.select("a.example", [PUBLIC]).addresses == [PUBLIC]
    assert reach.select("b.example", ["10.0.0.1"]).addresses == []


def test_a_host_keeps_its_kind_but_not_its_address() -> None:
    reach = PageReach(None)
    assert reach.select("wiki", ["10.0.0.1"]).addresses == ["10.0.0.1"]
    assert reach.select("WIKI.", ["10.0.0.2", PUBLIC]).addresses == ["10.0.0.2"]
    refused = reach.select("wiki", [PUBLIC])
    assert refused == ([], "is a public address, which may not replace a local one (browser.public_networks)")
    assert reach.select("a.example", [PUBLIC]).addresses == [PUBLIC]
    assert reach.select("a.example", [OTHER_PUBLIC, "10.0.0.1"]).addresses == [OTHER_PUBLIC]
    refused = reach.select("a.example.", ["10.0.0.1"])
    assert refused == ([], "is a private address, which may not replace a public one (browser.public_networks)")


@pytest.mark.parametrize("special", ["2002:808:808::1", "2001::1", "64:ff9b:1::808:808", "198.18.0.1", "192.0.0.192"])
def test_an_address_that_may_be_a_strangers_gives_a_page_no_rights(special: str) -> None:
    """A tunnel or a NAT64 leads to anybody."""
    reach = PageReach(None)
    assert reach.select("a.example", [special, "10.0.0.1"]).addresses == [special]
    assert reach.select("a.example", [special]).addresses == [special]
    assert reach.select("b.example", [PUBLIC]).addresses == [PUBLIC]
    for host, address in [("a.example", "127.0.0.1"), ("nas", "10.0.0.1"), ("c.example", "2002:7f00:1::1")]:
        assert reach.select(host, [address]).addresses == []


def test_networks_that_count_as_public() -> None:
    reach = PageReach(None, AddressGuard(["64:ff9b:1::/48"]))
    assert reach.select("a.example", [PUBLIC_6]).addresses == [PUBLIC_6]
    assert reach.select("b.example", ["64:ff9b:1::808:808"]).addresses == ["64:ff9b:1::808:808"]
    assert reach.select("c.example", ["10.0.0.1"]).addresses == []


def test_hosts_beyond_the_limit_have_to_be_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "_MAX_HOSTS", 2)
    reach = PageReach(None)
    for host in ("wiki", "nas"):
        assert reach.select(host, ["10.0.0.1"]).addresses == ["10.0.0.1"]
    assert reach.select("printer", ["10.0.0.1"]).addresses == []
    assert reach.select("a.example", [PUBLIC]).addresses == [PUBLIC]
    assert reach.select("a.example", ["10.0.0.1"]).addresses == []
    assert reach.select("nas", ["10.0.0.2"]).addresses == ["10.0.0.2"]


KINDS = {
    **dict.fromkeys((PUBLIC, OTHER_PUBLIC, PUBLIC_6, "64:ff9b::808:808"), "public"),
    **dict.fromkeys(("10.0.0.1", "127.0.0.1", "::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "0.0.0.0"), "local"),
    **dict.fromkeys(("2002:808:808::1", "2001::1", "64:ff9b:1::808:808", "198.18.0.1", "240.0.0.1"), "special"),
}
ANSWERS = st.lists(st.sampled_from([*KINDS]), min_size=1)


@given(st.lists(st.tuples(st.sampled_from("abc"), ANSWERS), min_size=1), st.sampled_from([None, AddressGuard([])]))
def test_no_answers_of_a_name_server_mix_the_kinds(
    look_ups: list[tuple[str, list[str]]], guard: AddressGuard | None
) -> None:
    reach = PageReach(guard)
    kinds: dict[str, set[str]] = {}
    for host, answer in look_ups:
        selected, refusal = reach.select(host, answer)
        assert set(selected) <= set(answer)
        assert selected or refusal
        kinds.setdefault(host, set()).update(KINDS[each] for each in selected)
    assert all(len(kind) <= 1 for kind in kinds.values())
    page, *others = [next(iter(kind)) for kind in kinds.values() if kind] or ["public"]
    if page != "local":
        assert set(others) <= {"public"}
    if guard is not None:
        assert page == "public"


@pytest.mark.parametrize("host", ["127.0.0.1", "printer", "::1", "metadata.google.internal"])
def test_the_text_decides_behind_a_proxy(host: str) -> None:
    reach = PageReach(None)
    assert reach.refuses_host("a.example") is None
    refusal = reach.refuses_host(host)
    assert refusal is not None
    assert refusal.endswith(", which only pages from local addresses may contact (browser.public_networks)")
    assert reach.refuses_host("b.example") is None
    assert reach.refuses_host("127.1") == refusal.replace(refusal.partition(",")[0], "is not a host name")
    reach = PageReach(None)
    assert [reach.refuses_host(each) for each in (host, "a.example", "10.0.0.1")] == [None] * 3
    reach = PageReach(AddressGuard([]))
    assert str(reach.refuses_host(host)).endswith(", which may not be contacted (serve.allow)")
