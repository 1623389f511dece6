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

document.querySelectorAll("time").forEach(ownTime);
if (live) follow();
