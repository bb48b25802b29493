"""A page of the shop that JavaScript builds: its HTML is an empty shell."""

from __future__ import annotations

PAGE = b"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>The Shoal Bookshop</title></head>
<body><div id="app"></div>
<script>
const app = document.getElementById("app");
let after = "", loading = false, search = "";
function show() {
    for (const row of app.querySelectorAll("li.book"))
        row.hidden = !row.textContent.toLowerCase().includes(search);
    for (const row of app.querySelectorAll("li.book[hidden]")) row.remove();
}
async function more() {
    if (loading || after === null) return;
    loading = true;
    const found = await (await fetch("/api/books?after=" + after)).json();
    for (const book of found.books) {
        const row = document.createElement("li");
        row.className = "book";
        row.style.minHeight = "60px";
        row.innerHTML = "<h3></h3> <span class=price></span>";
        row.firstChild.textContent = book.title;
        row.lastChild.textContent = book.price;
        app.querySelector("ul").append(row);
    }
    after = found.cursor;
    loading = false;
    show();
}
app.innerHTML = "<h1>All books</h1><input name=search><button id=more>More</button><ul></ul>";
app.querySelector("#more").onclick = more;
app.querySelector("input").onkeydown = event => {
    if (event.key === "Enter") { search = event.target.value.toLowerCase(); show(); }
};
window.onscroll = () => {
    if (window.innerHeight + window.scrollY >= document.body.scrollHeight - 10) more();
};
more();
</script></body></html>
"""
