// The dashboard's own script: JSON bodies for htmx, messages, times in the reader's time zone, charts.
"use strict";

// -- requests: forms are sent as JSON, as the HTTP API expects

const READERS = {
  number: (text) => Number(text),
  pairs: (text) => Object.fromEntries(text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
    const at = line.indexOf("=");
    return at < 0 ? [line, true] : [line.slice(0, at).trim(), line.slice(at + 1).trim()];
  })),
  json: (text) => JSON.parse(text),
  wait: (text) => (/^\d+$/.test(text.trim()) ? Number(text) : text.trim()),
  lines: (text) => text.split("\n").map((line) => line.trim()).filter(Boolean),
};

// `a.b` names a value in the object `a`. Fields with `data-list` are elements of a list.
function put(body, field, value) {
  const path = field.name.split(".");
  const last = path.pop();
  const owner = path.reduce((each, name) => (each[name] ??= {}), body);
  if ("list" in field.dataset) (owner[last] ??= []).push(value);
  else owner[last] = value;
}

function bodyOf(form) {
  const body = {};
  for (const field of form.querySelectorAll("[name]")) {
    if (field.type === "checkbox" || field.type === "radio") {
      if (field.checked) put(body, field, field.hasAttribute("value") ? field.value : true);
      else if ("off" in field.dataset) put(body, field, JSON.parse(field.dataset.off));
    } else if (field.value.trim() !== "") {
      const type = field.dataset.type || (field.type === "number" ? "number" : "");
      put(body, field, type ? READERS[type](field.value) : field.value);
    }
  }
  return body;
}

// Show what is wrong with a form beside its fields.
function showErrors(form, details) {
  form.querySelectorAll(".field-error").forEach((each) => each.remove());
  form.querySelectorAll("[aria-invalid]").forEach((each) => {
    each.removeAttribute("aria-invalid");
    each.removeAttribute("aria-describedby");
  });
  for (const { where, message } of details) {
    const path = where.replace(/^body\.?/, "");
    const field = [...form.querySelectorAll("[name]:not([type=hidden])")]
      .filter((each) => path === each.name || path.startsWith(`${each.name}.`))
      .sort((a, b) => b.name.length - a.name.length)[0];
    if (!field) continue;
    const line = document.createElement("span");
    line.className = "field-error";
    line.id = `error-${field.name}`;
    line.textContent = message;
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-describedby", line.id);
    field.after(line);
    field.focus();
  }
}

htmx.defineExtension("shoal-json", {
  onEvent(name, event) {
    if (name === "htmx:configRequest" && event.detail.verb !== "get") {
      event.detail.headers["Content-Type"] = "application/json";
    }
  },
  encodeParameters(xhr, parameters, element) {
    if (element.tagName === "FORM") return JSON.stringify(bodyOf(element));
    return element.dataset.body || (element.hasAttribute("hx-delete") ? "" : "{}");
  },
});

// -- messages

function toast(text, bad) {
  const line = document.createElement("p");
  line.textContent = text;
  if (bad) line.className = "bad";
  document.getElementById("toasts").append(line);
  setTimeout(() => line.remove(), Math.max(bad ? 12000 : 5000, text.length * 80)); // time to read it
}

// The value at a path such as `results.0.error`.
function at(values, path) {
  return path.split(".").reduce((each, name) => (each === null || each === undefined ? undefined : each[name]), values);
}

function filled(text, values) {
  return text.replace(/\{([\w.]+)\}/g, (all, path) => at(values, path) ?? all);
}

function answerOf(xhr) {
  try {
    return JSON.parse(xhr.responseText) || {};
  } catch {
    return {};
  }
}

document.addEventListener("htmx:afterRequest", (event) => {
  const { elt, xhr, successful, requestConfig } = event.detail;
  if (!requestConfig || requestConfig.verb === "get") return;
  const answer = answerOf(xhr);
  const problem = successful ? null : answer.error;
  if (elt.tagName === "FORM") showErrors(elt, (problem && problem.details) || []);
  if (!successful) {
    toast(problem ? problem.message : xhr.status ? `The server answered with status ${xhr.status}.` : "The server does not answer.", true);
    return;
  }
  if (elt.dataset.then) {
    location.href = elt.dataset.then.replace(/\{(\w+)\}/g, (all, name) => encodeURIComponent(answer[name]));
    return;
  }
  const failure = elt.dataset.problem && at(answer, elt.dataset.problem);
  if (failure) {
    toast(failure, true);
    refresh();
    return;
  }
  if (elt.dataset.result) show(elt.dataset.result, answer);
  toast(filled(elt.dataset.done || "Done", answer));
  refresh();
});

// The answer of a request as text, in the element with this id.
function show(id, answer) {
  const place = document.getElementById(id);
  place.hidden = false;
  place.textContent = JSON.stringify(answer, null, 2);
}

// Show the effect of an action at once, not with the next message of the stream.
async function refresh() {
  const live = document.getElementById("live");
  if (!live) return;
  const response = await fetch(location.href, { headers: { "X-Part": "live" } });
  if (response.ok) {
    Idiomorph.morph(live, await response.text(), { morphStyle: "innerHTML" });
    htmx.process(live);
    enhance(live);
  }
}

document.addEventListener("htmx:sseError", () => { document.getElementById("connection").hidden = false; });
document.addEventListener("htmx:sseOpen", () => { document.getElementById("connection").hidden = true; });

// Keep what the reader opened: updates do not close it.
Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) =>
  !((name === "open" && node.tagName === "DETAILS") || (name === "tabindex" && node.className === "table"));
// Updates do not replace charts: only draw() changes them.
Idiomorph.defaults.callbacks.beforeNodeMorphed = (old) => !(old.classList && old.classList.contains("chart"));

// -- times in the reader's time zone

const FULL = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

function enhance(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    element.textContent = FULL.format(new Date(element.dateTime));
    element.title = element.dateTime;
  }
  makeScrollable(root);
  root.querySelectorAll(".chart[data-source]").forEach(draw);
}

// A table that is wider than the screen can be scrolled with the keyboard.
function makeScrollable(root) {
  for (const table of root.querySelectorAll(".table, pre")) {
    if (table.scrollWidth > table.clientWidth) table.tabIndex = 0;
  }
}

document.addEventListener("htmx:afterSwap", (event) => enhance(event.target));
document.addEventListener("DOMContentLoaded", () => enhance(document));

// -- charts

const CHARTS = new Map();
const EVERY = 5000;
const STEPS = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800, 2592000];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Times on the axis: with seconds for short ranges, with the day for long ones.
function timesOf(u, moments) {
  const seconds = moments.length > 1 ? moments[moments.length - 1] - moments[0] : 0;
  const parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (seconds < 300) parts.second = "2-digit";
  if (seconds > 86400) Object.assign(parts, { day: "numeric", month: "short" });
  const format = new Intl.DateTimeFormat(undefined, parts);
  return moments.map((moment) => format.format(new Date(1000 * moment)));
}

function chartOptions(place, series) {
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line") }, ticks: { stroke: colour("line") } };
  return {
    width: Math.max(260, place.clientWidth - 16), height: 200, legend: { live: true },
    scales: { y: { range: (u, low, high) => [0, Math.max(high * 1.1, 1)] } },
    axes: [{ ...axis, values: timesOf, space: 80, incrs: STEPS }, { ...axis, size: 60 }],
    series: [{ label: "Time", value: (u, moment) => (moment ? FULL.format(new Date(1000 * moment)) : "") }, ...series.map((each) => ({ label: each.label, stroke: colour(each.colour), width: 2, spanGaps: false, dash: each.label === "items/s" ? [7, 5] : undefined }))],
  };
}

// An element with `data-source` shows the JSON of that address: {"times": [...], "series": [{label, colour, values}]}.
async function draw(place) {
  if (CHARTS.has(place)) return;
  CHARTS.set(place, null);
  const update = async () => {
    if (!place.isConnected) return CHARTS.delete(place);
    try {
      const response = await fetch(place.dataset.source);
      if (response.ok) paint(place, await response.json());
    } catch { /* the server is away; the next update tries again */ }
    setTimeout(update, EVERY);
  };
  update();
}

function valuesOf(data) {
  return [data.times, ...data.series.map((each) => each.values)];
}

function paint(place, data) {
  const values = valuesOf(data);
  place.chartData = data;
  let chart = CHARTS.get(place);
  if (!data.times.length) {
    if (!chart) place.textContent = "No history yet.";
    return;
  }
  if (!chart || chart.series.length !== values.length) {
    place.replaceChildren();
    chart = new uPlot(chartOptions(place, data.series), values, place);
    CHARTS.set(place, chart);
  } else {
    chart.setData(values);
  }
  // The newest values are shown while the pointer is elsewhere.
  setTimeout(() => { if (chart.cursor.left < 0) chart.setLegend({ idx: data.times.length - 1 }); });
}

// The colours of a chart are part of it: redraw it when the theme changes.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [place, chart] of CHARTS) {
    if (!chart) continue;
    chart.destroy();
    CHARTS.set(place, null);
    paint(place, place.chartData);
  }
});

addEventListener("resize", () => {
  makeScrollable(document);
  for (const [place, chart] of CHARTS) {
    if (chart) chart.setSize({ width: Math.max(260, place.clientWidth - 16), height: 200 });
  }
});
