"use strict";
// What pages can do beyond links and forms: the reader's own time, keys, copying, and lists that go on by themselves.
// Every value is set as text. Without this file all pages still work.

const two = (number) => String(number).padStart(2, "0");

function ownTime(element) {
  const at = new Date(element.dateTime);
  if (isNaN(at)) return;
  const own = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ` +
    `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const away = -at.getTimezoneOffset();
  if (!away) return; // UTC is what stands there
  const zone = `${away < 0 ? "-" : "+"}${two(Math.floor(Math.abs(away) / 60))}:${two(Math.abs(away) % 60)}`;
  const utc = document.createElement("span");
  utc.className = "dim";
  utc.textContent = ` ${element.dateTime.slice(11, 19)}Z`;
  element.title = element.dateTime;
  element.textContent = `${own} ${zone}`;
  element.append(utc);
}

// ---- keys

let row = -1;

function go(step) {
  const links = [...document.querySelectorAll("main tbody tr a:first-of-type")];
  if (!links.length) return;
  row = Math.max(0, Math.min(links.length - 1, row + step));
  links[row].focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const search = document.querySelector("input[name=q]"), keys = document.getElementById("keys");
  if (event.key === "/" && search) search.focus();
  else if (event.key === "j") go(1);
  else if (event.key === "k") go(-1);
  else if (event.key === "?" && keys) keys.showModal();
  else return;
  event.preventDefault();
});

// ---- copying

for (const text of document.querySelectorAll("pre.copy")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text); // no clipboard without TLS: select it, for the reader to copy
    }
  });
  text.before(button);
}

// ---- a list that goes on

const MOST_ROWS = 200;
const live = document.querySelector(".live");

function newRow(found) {
  const line = document.createElement("tr");
  const cell = (text, name) => {
    const made = document.createElement("td");
    if (name) made.className = name;
    made.textContent = text;
    line.append(made);
    return made;
  };
  const link = document.createElement("a");
  link.href = `${live.dataset.message}?${new URLSearchParams({ topic: found.topic, queue: found.queueId, offset: found.queueOffset })}`;
  link.textContent = found.place;
  cell("").append(link);
  const time = document.createElement("time");
  time.dateTime = new Date(found.storeTimestamp).toISOString();
  time.textContent = time.dateTime.replace("T", " ");
  ownTime(time);
  cell("").append(time);
  cell(found.tags);
  cell(found.keys);
  cell(found.size.toLocaleString("en"), "num");
  for (const each of found.cells) cell(each);
  cell(found.body, "body");
  return line;
}

function follow() {
  const button = live.querySelector("button"), status = live.querySelector("[role=status]");
  const rows = document.querySelector("main tbody");
  let stream = null, shown = 0, dropped = 0, begun = false;
  const tell = (text) => { status.textContent = text + (dropped ? `; ${dropped.toLocaleString("en")} came too fast and are not shown` : ""); };
  const stop = (text) => {
    if (stream) stream.close();
    stream = null;
    button.textContent = "Live";
    button.setAttribute("aria-pressed", "false");
    tell(text);
  };
  live.hidden = false;
  button.addEventListener("click", () => {
    if (stream) return stop("Paused");
    stream = new EventSource(live.dataset.events);
    button.textContent = "Pause";
    button.setAttribute("aria-pressed", "true");
    tell("Connecting");
    stream.addEventListener("begin", () => {
      tell(begun ? "Live again. What came in between is not in this list" : "Waiting for new messages");
      begun = true;
    });
    stream.addEventListener("again", () => tell("Live again"));
    stream.addEventListener("dropped", (event) => { dropped += JSON.parse(event.data).count; tell(`${shown.toLocaleString("en")} new`); });
    stream.addEventListener("fault", (event) => tell(JSON.parse(event.data).sentence));
    stream.addEventListener("message", (event) => {
      document.querySelector("main .empty")?.remove();
      rows.prepend(newRow(JSON.parse(event.data)));
      while (rows.children.length > MOST_ROWS) rows.lastChild.remove();
      shown += 1;
      tell(`${shown.toLocaleString("en")} new`);
    });
    stream.addEventListener("error", () => {
      if (stream && stream.readyState === EventSource.CLOSED) stop("Ended: 32 live lists are open, or you are logged out. Load the page again");
      else tell("The dashboard does not answer. Trying again");
    });
  });
}

// ---- curves: uPlot in the place of the bars that the server drew, with the values of the table below

const here = document.currentScript.src;

function loaded(kind, attributes) {
  return new Promise((done, failed) => {
    const element = Object.assign(document.createElement(kind), attributes);
    element.addEventListener("load", done);
    element.addEventListener("error", failed);
    document.head.append(element);
  });
}

function plot(bars, table) {
  const rows = [...table.tBodies[0].rows];
  const times = rows.map((row) => Date.parse(row.dataset.time) / 1000);
  const counts = rows.map((row) => Number(row.lastElementChild.textContent.replaceAll(",", "")));
  const box = document.createElement("div");
  box.className = "plot";
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", bars.getAttribute("aria-label"));
  bars.before(box);
  bars.classList.add("replaced");
  let chart = null;
  const draw = () => {
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
    chart?.destroy();
    chart = new uPlot({
      width: box.clientWidth,
      height: 180,
      scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
      axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => tick.toLocaleString("en")) }],
      series: [
        { label: "Time" },
        {
          label: table.tHead.rows[0].lastElementChild.textContent,
          stroke: colour("bar"),
          fill: `${colour("bar")}40`,
          width: 1.5,
          value: (_, count) => (count === null ? "" : count.toLocaleString("en")),
        },
      ],
    }, [times, counts], box);
  };
  draw();
  new ResizeObserver(() => chart.setSize({ width: box.clientWidth, height: 180 })).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

async function plotAll() {
  const found = [...document.querySelectorAll("svg.curve")]
    .map((bars) => [bars, bars.parentElement.querySelector("table.points")])
    .filter(([, table]) => table !== null && table.tBodies[0].rows.length > 1);
  if (!found.length) return;
  try {
    await Promise.all([
      loaded("link", { rel: "stylesheet", href: new URL("uplot/uPlot.min.css", here).href }),
      loaded("script", { src: new URL("uplot/uPlot.iife.min.js", here).href }),
    ]);
  } catch {
    return; // the bars stay
  }
  found.forEach(([bars, table]) => plot(bars, table));
}

// ---- a search that goes on: hits appear as they are found

const search = document.querySelector(".search");
const STEP = 8 << 20, MOST_SEARCHED = 256 << 20;

function searchOn() {
  const button = search.querySelector("button"), bar = search.querySelector("progress");
  const status = search.querySelector("[role=status]"), list = search.querySelector("ul");
  const link = document.querySelector(".go-on");
  let after = search.dataset.after, stopped = true;
  const gibibytes = (bytes) => `${(bytes / 1073741824).toLocaleString("en", { maximumFractionDigits: 2 })}`;
  const stop = () => { stopped = true; button.textContent = "Go on here"; };
  const addHit = (found) => {
    const hit = document.createElement("a"), line = document.createElement("li");
    if (!found.inQueue) {
      line.textContent = `${found.topic}/${found.queueId} @${found.queueOffset}, in its queue no more: the topic was deleted`;
      list.append(line);
      return;
    }
    hit.href = `${search.dataset.message}?${new URLSearchParams({ topic: found.topic, queue: found.queueId, offset: found.queueOffset })}`;
    hit.textContent = `${found.topic}/${found.queueId} @${found.queueOffset}`;
    line.append(hit);
    list.append(line);
  };
  const run = async () => {
    for (let searched = 0; !stopped && searched < MOST_SEARCHED;) {
      const asked = new URLSearchParams({ q: search.dataset.q, after, most: STEP });
      const answer = await fetch(`${search.dataset.search}?${asked}`);
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      found.messages.forEach(addHit);
      searched += found.searchedSize;
      bar.max = found.logSize;
      bar.value = found.doneSize;
      status.textContent = `searched ${gibibytes(found.doneSize)} of ${gibibytes(found.logSize)} GiB`;
      if (found.goOn === null) {
        status.textContent += "; this is all";
        button.remove();
        link.parentElement.remove();
        return;
      }
      after = String(found.goOn);
      const place = new URL(link.href);
      place.searchParams.set("after", after);
      link.href = place.href;
      link.textContent = `Go on at ${after}`;
      history.replaceState(null, "", link.href);
    }
    stop();
  };
  search.hidden = false;
  button.addEventListener("click", () => {
    if (!stopped) return stop();
    stopped = false;
    button.textContent = "Stop";
    run().catch((error) => { status.textContent = error.message; stop(); });
  });
}

// ---- the check of a store

const check = document.querySelector(".check");

async function followCheck() {
  const bar = check.querySelector("progress"), status = check.querySelector("[role=status]");
  if (!bar) return;
  const mebibytes = (bytes) => `${(bytes / 1048576).toLocaleString("en", { maximumFractionDigits: 0 })} MiB`;
  try {
    const found = await (await fetch(check.dataset.check)).json();
    if (found.state !== "runs") return location.assign(location.href);
    bar.max = found.total || 1;
    bar.value = found.done;
    status.textContent = `${mebibytes(found.done)} of ${mebibytes(found.total)}`;
  } catch {
    status.textContent = "The dashboard does not answer. Trying again";
  }
  setTimeout(followCheck, 1000);
}

document.querySelectorAll("time").forEach(ownTime);
plotAll();
if (check) followCheck();
if (search) searchOn();
if (live) follow();
