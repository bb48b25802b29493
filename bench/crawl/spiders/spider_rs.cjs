// spider-rs through its Node binding. It finds and follows the links in Rust. An item has only the URL and the title, found
// with a regular expression, because parsing the page in JavaScript would measure something else.
const fs = require('fs');
const { createRequire } = require('module');
const { Website } = createRequire(`${process.argv[2]}/`)('@spider-rs/spider-rs');

const output = fs.openSync(process.env.BENCH_OUTPUT, 'w');
const entities = { '&amp;': '&', '&lt;': '<', '&gt;': '>' };
let lines = [];
const flush = () => {
  if (lines.length) fs.writeSync(output, lines.join(''));
  lines = [];
};
const site = new Website(process.env.BENCH_URL).withRespectRobotsTxt(true).withDelay(0);
const hosts = process.env.BENCH_HOSTS.split(',').filter(Boolean);
if (hosts.length) site.withExternalDomains(hosts.map((host) => `https://${host}:${new URL(process.env.BENCH_URL).port}`));
site.withBudget({ '*': Number(process.env.BENCH_LIMIT) || 1000000 });
site
  .build()
  .crawl((error, page) => {
    if (error || page.statusCode !== 200) return;
    const found = /<title>([^<]*)/.exec(page.content);
    const title = found && found[1].replace(/&(?:amp|lt|gt|#(\d+));/g, (entity, code) => entities[entity] || String.fromCodePoint(code));
    lines.push(`${JSON.stringify({ url: page.url, title })}\n`);
    if (lines.length > 200) flush();
  })
  .then(() => setTimeout(() => (flush(), process.exit(0)), 200)); // the last callbacks come after the crawl
