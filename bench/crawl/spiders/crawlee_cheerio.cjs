// Crawlee for JavaScript: CheerioCrawler on memory storage. The first argument is the folder with its packages.
// The concurrency is held fixed: the autoscaled pool would take a busy core for an overload and lower it.
const fs = require('fs');
const { createRequire } = require('module');
const { CheerioCrawler, Configuration, log, LogLevel } = createRequire(`${process.argv[2]}/`)('@crawlee/cheerio');

log.setLevel(LogLevel.ERROR);
const limit = Number(process.env.BENCH_LIMIT);
const concurrency = Number(process.env.BENCH_CONCURRENCY);
const output = fs.createWriteStream(process.env.BENCH_OUTPUT);
const crawler = new CheerioCrawler(
  {
    minConcurrency: concurrency,
    maxConcurrency: concurrency,
    maxRequestsPerCrawl: limit || undefined,
    respectRobotsTxtFile: true,
    sameDomainDelaySecs: Number(process.env.BENCH_DELAY),
    ignoreSslErrors: true,
    useSessionPool: false,
    async requestHandler({ $, request, response, enqueueLinks }) {
      if (response.statusCode !== 200) return;
      const item = { url: request.loadedUrl, title: $('title').text(), h1: $('h1').text(), links: $('a[href]').length };
      output.write(`${JSON.stringify(item)}\n`);
      await enqueueLinks({ strategy: 'all' });
    },
    failedRequestHandler() {}, // a dead link is part of the site
  },
  new Configuration({ persistStorage: false, systemInfoV2: false, availableMemoryRatio: 0.5 }),
);
crawler
  .run([process.env.BENCH_URL])
  .then(() => output.end(() => process.exit(0)))
  .catch((error) => {
    console.error(error);
    process.exit(1);
  });
