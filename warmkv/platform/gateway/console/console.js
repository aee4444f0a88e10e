// The console: what the service does, what other settings would do, and the live configuration. Texts of the service are
// set as text, never as HTML. The operator's key is in `key` alone: no storage, no cookie, no URL.

const BASE = new URL("v1/", location.href); // beside the page, whatever gateway.route_prefix is
const LIVE_MS = 2000, TABLES_MS = 5000, POINTS = 120;

const $ = (id) => document.getElementById(id);
let key = "", session = 0; // what a session has asked for is shown in that session alone
let hits = []; // hit rates, the latest last

// --- the service

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(method, path, body, caller = key) {
  const headers = { "x-api-key": caller };
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(new URL(path, BASE), {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store", credentials: "omit", redirect: "error",
  });
  const data = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, data.error?.message ?? `${answer.status} ${answer.statusText}`);
  return data;
}

function say(text, bad = false) {
  if ($("status").textContent === text) return; // a screen reader says it once
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

// --- elements and figures

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

const percent = (value, digits = 1) => (value == null ? "–" : `${(100 * value).toFixed(digits)}%`);
const signed = (value, text) => (value == null ? "" : `${value >= 0 ? "+" : "−"}${text(Math.abs(value))}`);
function dollars(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  return `${value < 0 ? "−" : ""}$${size.toFixed(size >= 100 ? 0 : size >= 0.1 ? 2 : 4)}`;
}

const seconds = (value) => (value == null ? "–" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`);
const count = (value) => (value ?? 0).toLocaleString("en");

function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${scaled.toFixed(power && scaled < 100 ? 1 : 0)} ${units[power]}`;
}

function redraw(id, rows) {
  if ($("confirm").open) return; // its button gets the focus back
  const held = $(id).contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  $(id).replaceChildren(...rows);
  if (held) [...$(id).querySelectorAll("[aria-label]")].find((made) => made.getAttribute("aria-label") === held)?.focus();
}

const plain = (changes) =>
  Object.entries(changes).map(([name, value]) => `${name} = ${typeof value === "string" ? value : JSON.stringify(value)}`).join("\n");

// --- live figures

function card(title, figure, text, ...more) {
  return make("div", { className: "card" }, make("h3", { textContent: title }),
    make("div", { className: "figure", textContent: figure }), make("p", { textContent: text }), ...more);
}

function line(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `hit rate of the last ${values.length} looks, now ${percent(values.at(-1))}`);
  const drawn = document.createElementNS(svg.namespaceURI, "polyline");
  const step = 100 / Math.max(1, values.length - 1);
  drawn.setAttribute("points", values.map((value, at) => `${(at * step).toFixed(1)},${(29 - 28 * value).toFixed(1)}`).join(" "));
  svg.append(drawn);
  return svg;
}

function showLive(live) {
  const { requests, tokens, replicas } = live;
  if (live.hit_rate != null) hits = [...hits, live.hit_rate].slice(-POINTS);
  const stored = Object.entries(replicas.stored_bytes), held = stored.reduce((sum, [, size]) => sum + size, 0);
  const limit = replicas.prefix_limit_bytes;
  const full = limit ? make("meter", { max: limit, high: 0.9 * limit, value: replicas.stored_bytes.device ?? 0 }) : null;
  full?.setAttribute("aria-label", "share of the prefix memory on devices");
  const unit = `last ${Math.round(live.seconds / 60)} minutes`;
  const whole = live.dollars.billed + live.dollars.saved;
  $("scope").textContent = `Version ${live.version}, model ${live.model}, ${count(replicas.serving)} replica${replicas.serving === 1 ? "" : "s"}. Requests are those of ` +
    (live.gateways > 1 ? `one of ${live.gateways} gateways, ` : "") + `the ${unit}.`;
  $("cards").replaceChildren(
    card("Hit rate", percent(live.hit_rate), `${count(tokens.cached)} of ${count(tokens.prompt)} prompt tokens reused`,
      hits.length > 1 ? line(hits) : null),
    card("Prefixes stored", bytes(held), (limit ? `device limit ${bytes(limit)}` : "") +
      stored.filter(([tier, size]) => tier !== "device" && size).map(([tier, size]) => `, ${bytes(size)} ${tier}`).join(""), full),
    card("Time to first token", seconds(live.ttft.p50), `p99 ${seconds(live.ttft.p99)}`),
    card("Time per token", seconds(live.tpot.p50), `p99 ${seconds(live.tpot.p99)}`),
    card("Billed", dollars(live.dollars.billed),
      `the cache saved ${dollars(live.dollars.saved)}${whole ? ` (${percent(live.dollars.saved / whole, 0)})` : ""}`),
    card("Requests", count(requests.ok), `${count(requests.error)} failed, ${count(requests.cancelled)} left, ` +
      `${count(live.waiting)} wait, ${count(replicas.decoding)} decode`),
    card("Decode slots", bytes(replicas.slot_bytes), `weights ${bytes(replicas.weight_bytes)}`),
  );
}

// --- what-if

function figure(row, name, text, relative) {
  const value = row.figures?.[name], change = row.difference?.[name];
  const cell = make("td", { textContent: value == null ? "–" : text(value) });
  if (change && row.candidate !== "now") {
    const shown = relative ? percent(Math.abs(change)) : `${(100 * Math.abs(change)).toFixed(1)} points`;
    cell.append(make("small", { textContent: `${change >= 0 ? "+" : "−"}${shown}` }));
  }
  return cell;
}

function candidate(row) {
  const actions = make("td", { className: "actions" });
  const now = row.candidate === "now";
  if (row.restart.length) actions.append("needs a restart");
  else if (!now) {
    const apply = make("button", { className: "apply", textContent: "Apply", type: "button", disabled: !row.figures });
    apply.setAttribute("aria-label", `Apply ${row.candidate}`);
    apply.addEventListener("click", () => confirmed(`Apply ${row.candidate}?`, plain(row.changes), `what-if: ${row.candidate}`, "Apply",
      (why) => change("PUT", "warmkv/policy", { changes: row.changes, why, version: row.version })));
    actions.append(apply);
  }
  if (!row.proposed && !now) {
    const away = make("button", { textContent: "Remove", type: "button" });
    away.setAttribute("aria-label", `Remove candidate ${row.candidate}`);
    away.addEventListener("click", () => change("DELETE", `warmkv/whatif/${encodeURIComponent(row.candidate)}`));
    actions.append(" ", away);
  }
  const name = make("th", { scope: "row", textContent: now ? "now" : row.candidate });
  if (row.pareto) name.append(make("small", { className: "soft", textContent: " ◆", title: "no other is better in everything" }));
  const what = row.fault ?? (now ? "the settings in force" : plain(row.changes));
  return make("tr", { className: now ? "now" : "" }, name,
    make("td", { className: row.fault ? "code bad" : "code", textContent: what }),
    figure(row, "hit_rate", percent), figure(row, "bytes", bytes, true), figure(row, "ttft_p99", seconds, true),
    figure(row, "dollars_per_million_tokens", dollars, true), figure(row, "quality", percent), actions);
}

function showWhatIf(table) {
  const window = table.window, error = table.model_error?.error;
  const parts = [`${count(window.requests)} requests in the window; ${table.fault ?? table.state}.`];
  if (error) {
    const of = { hit_rate: "hit rate", ttft_p99: "TTFT p99", dollars_per_million_tokens: "dollars" };
    const told = Object.entries(of).filter(([name]) => error[name] != null).map(([name, text]) => `${text} ${signed(error[name], percent)}`);
    parts.push(`The model's own error, of ${count(table.model_error.requests)} requests: ${told.join(", ")}.`);
  }
  $("trust").textContent = parts.join(" ");
  const pilot = table.autopilot;
  $("autopilot").textContent = pilot ? `Autopilot: ${pilot.state}: ${pilot.why}.` : "";
  redraw("candidates", table.candidates.map(candidate));
}

// --- versions

function version(row, current) {
  const actions = make("td", { className: "actions" });
  if (row.version === current) actions.append("in force");
  else {
    const back = make("button", { textContent: "Roll back", type: "button" });
    back.setAttribute("aria-label", `Roll back to version ${row.version}`);
    back.addEventListener("click", () => confirmed(`Roll back to version ${row.version}?`, row.why, "", "Roll back",
      (why) => change("POST", "warmkv/policy/rollback", { to: row.version, why, version: current })));
    actions.append(back);
  }
  const what = row.rolled_back_to == null ? plain(row.changes) : `as in version ${row.rolled_back_to}`;
  return make("tr", { className: row.version === current ? "now" : "" },
    make("th", { scope: "row", textContent: row.version }),
    make("td", { textContent: row.when ? new Date(row.when).toLocaleString() : "" }),
    make("td", { textContent: row.who }), make("td", { className: "why", textContent: row.why }),
    make("td", { className: "code", textContent: what }), actions);
}

// Which gateways have not the version in force that is the last, and why.
const behind = ({ version, parts }) => Object.entries(parts).filter(([, part]) => part.version !== version)
  .map(([name, part]) => `Gateway ${name} has version ${part.version} in force, not ${version}${part.fault ? `: ${part.fault}` : "."}`);

function showVersions(now, history) {
  const start = { version: 0, who: "", why: "the configuration at start", changes: {}, rolled_back_to: null };
  redraw("versions", [...history.versions, start].map((row) => version(row, now.version)));
  $("behind").textContent = [...behind(now), now.fault].filter(Boolean).join("\n");
}

// --- doing something

function confirmed(title, what, why, go, then) {
  $("confirm-title").textContent = title;
  $("confirm-what").textContent = what;
  $("why").value = why;
  $("go").textContent = go;
  $("confirm-form").onsubmit = (event) => {
    event.preventDefault();
    $("confirm").close();
    then($("why").value);
  };
  $("confirm").showModal();
}

function outcome(done) {
  const late = behind(done), came = `Version ${done.version} is ${late.length ? "not in force everywhere yet" : "in force"}.`;
  say([came, ...late, ...(done.warnings ?? []).map((warning) => `Mind: ${warning}.`)].join(" "), late.length > 0);
}

async function change(method, path, body) {
  const own = session;
  try {
    const done = await call(method, path, body);
    if (own === session) done.version === undefined ? say("Done.") : outcome(done);
  } catch (error) {
    if (own === session) say(error.message, true);
  }
  const found = await readTables().catch(() => null); // whoever follows tells
  if (own === session && found) showTables(found);
}

// --- following

async function readTables() {
  const whatif = call("GET", "warmkv/whatif").catch((error) => error);
  const [now, history] = await Promise.all([call("GET", "warmkv/policy"), call("GET", "warmkv/policy/history")]);
  return { now, history, table: await whatif };
}

function showTables({ now, history, table }) {
  showVersions(now, history);
  if (!(table instanceof Error)) showWhatIf(table);
  else if (table.status === 404) $("trust").textContent = table.message; // no what-if service here
  else throw table;
}

async function follow(read, show, pause) {
  const own = session;
  let failed = "";
  while (own === session) {
    if (!document.hidden) {
      try {
        const found = await read();
        if (own !== session) return;
        show(found);
        if (failed && $("status").textContent === failed) say("It answers again.");
        failed = "";
      } catch (error) {
        if (own !== session) return;
        failed = error.message;
        say(failed, true);
        if (error.status === 401 || error.status === 403) return forget();
      }
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function forget() {
  key = "";
  session += 1;
  hits = [];
  $("forget").hidden = true;
  for (const id of ["cards", "candidates", "versions"]) $(id).replaceChildren();
  $("scope").textContent = "Connect to see what the service does.";
  for (const id of ["trust", "autopilot", "behind"]) $(id).textContent = "";
}

$("connect").addEventListener("submit", (event) => {
  event.preventDefault();
  forget();
  key = $("key").value.trim();
  $("key").value = "";
  $("forget").hidden = false;
  say("Connected.");
  follow(() => call("GET", "warmkv/live"), showLive, LIVE_MS);
  follow(readTables, showTables, TABLES_MS);
});

$("forget").addEventListener("click", () => {
  forget();
  say("The key is forgotten.");
});

$("leave").addEventListener("click", () => $("confirm").close());

$("try").addEventListener("submit", (event) => {
  event.preventDefault();
  const { setting, value } = event.target.elements;
  let read = value.value;
  try {
    read = JSON.parse(read);
  } catch {} // a plain word, as snapkv@0.5
  change("POST", "warmkv/whatif", { changes: { [setting.value.trim()]: read } });
});

// --- asking

const REASONS = {
  never_written: "no earlier request of this tenant was the same up to there",
  changed: "another content stood there before",
  expired: "it was written, and its TTL has run out",
  evicted: "it was written, and gave way to others",
  other_replica: "another replica has it, or had",
  lookback: "it was written too far before the mark",
  thinking: "the template drops thinking that it showed before",
  template: "the template shows the same content otherwise",
  parallel: "another request is still writing it",
  below_minimum: "the prefix is shorter than prefix_cache.min_tokens",
  unmarked: "nothing is marked for the cache",
  disabled: "prefix_cache.enabled is off",
};

function warmth({ found, missed, reason, missed_tokens }) {
  const read = found ? `read up to ${found}` : "nothing read";
  if (!reason) return read;
  const tokens = Object.entries(missed_tokens).map(([name, missing]) => `${count(missing)} tokens ${name}`).join(", ");
  return `${read}; cold from ${missed ?? "there"} on: ${REASONS[reason] ?? reason}${tokens ? ` (${tokens})` : ""}`;
}

function facts(usage) {
  const own = usage.warmkv, price = own.price;
  const written = Object.entries(price.write).filter(([, value]) => value).map(([ttl, value]) => `, written for ${ttl} ${dollars(value)}`).join("");
  const rows = [
    ["Prompt", `${count(usage.cache_read_input_tokens)} tokens read, ${count(usage.cache_creation_input_tokens)} written, ` +
      `${count(usage.input_tokens)} neither; ${count(own.cached_tokens)} not computed again`],
    ["Cache", warmth(own.cache)],
    ["Answer", `${count(usage.output_tokens)} tokens`],
    ["Price", `${dollars(price.total)}: input ${dollars(price.input)}, read ${dollars(price.read)}${written}, output ${dollars(price.output)}`],
    ["Time", `first token after ${seconds(own.ttft_seconds)}, of it ${seconds(own.queue_seconds)} in the queue`],
    ["Served", `by ${own.replica} under ${own.policy}, version ${own.policy_version}`],
  ];
  return make("dl", {}, ...rows.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]));
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const { key: tenant, text, question } = event.target.elements;
  const button = event.target.querySelector("button");
  const content = [{ type: "text", text: question.value }];
  if (text.value) content.unshift({ type: "text", text: text.value, cache_control: { type: "ephemeral" } });
  button.disabled = true;
  try {
    const model = (await call("GET", "models", undefined, tenant.value)).data[0].id;
    const asked = { model, max_tokens: 128, messages: [{ role: "user", content }] };
    const { content: parts, usage } = await call("POST", "messages", asked, tenant.value);
    const said = parts.map((part) => part.text ?? JSON.stringify(part)).join("");
    $("answers").prepend(make("div", { className: "answer" }, make("p", { textContent: question.value, className: "soft" }),
      make("pre", { textContent: said }), facts(usage)));
  } catch (error) {
    say(error.message, true);
  }
  button.disabled = false;
});
