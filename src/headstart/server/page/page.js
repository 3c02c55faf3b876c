// The playground: a chat whose tokens show where they came from, a race, and what the server tells about itself.
// Whatever comes from a model or a server goes into the page as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
const TRIES = [
  "Count from one to thirty in words.",
  "Write a Python class for a stack, then one for a queue.",
  "List ten animals and the sound of each.",
];
const RACE_PROMPT = `Rename the class Box to Basket in this Python code, and change nothing else:

class Box:
    def __init__(self):
        self.things = []

    def put(self, thing):
        self.things.append(thing)

    def take(self):
        return self.things.pop()`;
const RACE_SEED = 1; // where the settings name none: both runs need the same
const POLL_MS = 1000;
const KEPT_SAMPLES = 120;
const WINDOW = 16; // steps that one point of block efficiency looks back on
const HIDE_MS = 180; // so that the pointer can move from a token onto its card
const LABEL = 14; // characters of a token in the tree
const KEY = "headstart-key";
const THEME = "headstart-theme";

// ------------------------------------------------------------------ small things
function make(tag, className, text) {
  const out = document.createElement(tag);
  if (className) out.className = className;
  if (text !== undefined) out.textContent = text;
  return out;
}

function draw(tag, attributes, text) {
  const out = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) out.setAttribute(name, value);
  if (text !== undefined) out.textContent = text;
  return out;
}

/** Blanks and what cannot be seen, made visible. Characters that turn the direction of writing would garble the page. */
function visible(text) {
  const names = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
  return text.replace(/[\s\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (c) => {
    return names[c] ?? `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
  });
}

function clip(text, most) {
  const all = Array.from(text);
  return all.length > most ? all.slice(0, most - 1).join("") + "…" : text;
}

const quoted = (text) => `“${clip(visible(text), 24)}”`;
const counted = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const fixed = (n, digits = 2) => (Number.isFinite(n) ? n.toFixed(digits) : "–");

function percent(p) {
  if (p > 0 && p < 0.0005) return "<0.1%";
  return `${(100 * p).toFixed(p > 0 && p < 0.0995 ? 1 : 0)}%`;
}

/** Storage may be forbidden; the page works without. */
function stored(store, name, value) {
  try {
    if (value === undefined) return window[store].getItem(name);
    if (value) window[store].setItem(name, value);
    else window[store].removeItem(name);
  } catch {
    return null;
  }
  return value;
}

/** Runs each of these once, before the next frame is painted. */
const due = new Set();
function soon(work) {
  if (!due.size) requestAnimationFrame(runDue);
  due.add(work);
}
function runDue() {
  const all = [...due];
  due.clear();
  for (const work of all) work();
}

// ------------------------------------------------------------------ what went wrong, and keys
class ServerSays extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function showError(message, offer) {
  const box = make("div", "error", message);
  if (offer) {
    const row = make("div", "row");
    const button = make("button", "", offer.label);
    button.type = "button";
    button.addEventListener("click", offer.run);
    row.append(button);
    box.append(row);
  }
  $("errors").replaceChildren(box);
}
const clearError = () => $("errors").replaceChildren();
const announce = (text) => void ($("news").textContent = text);

let key = stored("sessionStorage", KEY) || "";

function askForKey() {
  const form = $("key-form");
  if (key) showError("The server did not accept this key.");
  if (!form.hidden) return;
  form.hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  stored("sessionStorage", KEY, key);
  $("key").value = "";
  $("key-form").hidden = true;
  clearError();
  $("message").focus();
  poll();
});

// ------------------------------------------------------------------ asking the server
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerSays(0, "The server cannot be reached.");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new ServerSays(answer.status, told?.error?.message ?? `The server answered ${answer.status}.`);
}

/** Events of a stream, as they come. */
async function* stream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerSays(500, event.error.message);
      yield event;
    }
  }
}

const numberOf = (id) => ($(id).value.trim() === "" ? undefined : Number($(id).value));
const isPlain = () => $("mode").value === "plain";

/** The settings as fields of a request. */
function asked() {
  const method = $("method").value;
  return {
    stream: true,
    stream_options: { include_usage: true },
    show_drafts: true,
    metrics: true,
    temperature: numberOf("temperature"),
    max_tokens: numberOf("max-tokens"),
    seed: numberOf("seed"),
    speculative: method === "" ? undefined : method === "off" ? { enabled: false } : { method },
  };
}

const pathOf = (plain) => (plain ? "v1/completions" : "v1/chat/completions");

/** Both shapes of log probabilities -> [{token, p, top: [[text, p], ...]}] */
function probabilities(told) {
  if (!told) return [];
  if (told.content) {
    return told.content.map((t) => ({
      token: t.token,
      p: Math.exp(t.logprob),
      top: (t.top_logprobs ?? []).map((o) => [o.token, Math.exp(o.logprob)]),
    }));
  }
  return told.tokens.map((token, i) => ({
    token,
    p: Math.exp(told.token_logprobs[i]),
    top: Object.entries(told.top_logprobs?.[i] ?? {}).map(([text, value]) => [text, Math.exp(value)]),
  }));
}

// ------------------------------------------------------------------ origins and their colours
const COLOURS = 8;
const drafters = []; // names, in the order of their colours

function colourOf(name) {
  let i = drafters.indexOf(name);
  if (i < 0) {
    i = drafters.push(name) - 1;
    soon(drawLegend);
  }
  return `o${i % COLOURS}`;
}

function drawLegend() {
  const entry = (className, what) => {
    const li = make("li");
    li.append(make("span", `sample ${className}`, "word"), ` ${what}`);
    return li;
  };
  $("legend").replaceChildren(
    ...drafters.map((name) => entry(`drafted ${colourOf(name)}`, `drafted by ${name}, accepted`)),
    entry("bonus", "the model's own, as a bonus after a right draft"),
    entry("instead", "the model's own, in place of a wrong draft"),
    entry("alone", "the model's own, nothing was drafted"),
  );
}

/** The nodes that were drafted at this place of a step, behind the path that was accepted so far. */
function draftedAt(step, place) {
  const { parents, accepted } = step.draft;
  if (place > accepted.length) return [];
  const parent = place === 0 ? -1 : accepted[place - 1];
  return parents.flatMap((p, node) => (p === parent ? [node] : []));
}

const rejectedAt = (step, place) => draftedAt(step, place).filter((node) => node !== step.draft.accepted[place]);

/** bonus, instead or alone for the model's own tokens; a drafter's class for the others. */
function kindOf(step, place) {
  const origin = step?.origins[place];
  if (origin) return `drafted ${colourOf(origin)}`;
  if (!step || !step.draft.tokens.length) return "alone";
  return draftedAt(step, place).length ? "instead" : "bonus";
}

function originInWords(step, place) {
  const origin = step.origins[place];
  if (origin) return `Drafted by ${origin}, accepted.`;
  return {
    alone: "The model's own: nothing was drafted here.",
    instead: "The model's own: it rejected what was drafted here.",
    bonus: "The model's own, as a bonus: the draft before it was right.",
  }[kindOf(step, place)];
}

// ------------------------------------------------------------------ one text that grows
/** Steps and tokens of an answer. Spans are made at most once a frame, however fast events come. */
class Answer {
  constructor(host, follow, tells = false) {
    this.host = host; // the element that holds the text
    this.follow = follow; // the element that scrolls
    this.tells = tells; // whether its tokens have cards
    this.steps = [];
    this.text = "";
    this.count = 0;
    this.pieces = [];
    this.last = null; // the token that may go on
    this.paint = () => this.#paint();
  }

  add(choice, at) {
    const told = choice.speculation;
    const text = choice.delta ? (choice.delta.content ?? "") : (choice.text ?? "");
    this.text += text;
    if (told?.tokens.length) {
      const { tokens, origins, draft } = told;
      this.steps[told.step] = { tokens, origins, draft, at, told: probabilities(choice.logprobs), spans: [] };
      this.count += tokens.length;
    }
    this.pieces.push(...(told ? told.pieces : text ? [[text, -1, -1]] : []));
    soon(this.paint);
  }

  /** All of it now: an answer is not called finished while a part of it waits for a frame. */
  flush() {
    due.delete(this.paint);
    this.#paint();
  }

  #paint() {
    const down = this.follow.scrollHeight - this.follow.scrollTop - this.follow.clientHeight < 60;
    const fresh = document.createDocumentFragment();
    for (const [text, step, place] of this.pieces) this.#piece(fresh, text, step, place);
    this.pieces = [];
    this.host.append(fresh);
    if (down) this.follow.scrollTop = this.follow.scrollHeight;
  }

  #piece(fresh, text, number, place) {
    if (this.last && this.last.number === number && this.last.place === place) {
      this.last.span.textContent += text; // a part of it had been held back
      return;
    }
    const step = this.steps[number];
    const span = make("span", `t ${kindOf(step, place)}`, text);
    if (this.tells && step && place >= 0) this.#link(span, step, number, place);
    this.last = { span, number, place };
    fresh.append(span);
  }

  #link(span, step, number, place) {
    span.tabIndex = -1;
    step.spans.push(span);
    placeOf.set(span, { answer: this, number, place });
    const begins = number === 0 && place === 0;
    if (!roving || (begins && document.activeElement !== roving)) rove(span, false);
  }
}

const placeOf = new WeakMap(); // span -> where its token stands

// ------------------------------------------------------------------ chat
const messages = [];
const answers = [];
let running = null; // the AbortController of what runs: a chat answer or a race

function setRunning(controller) {
  running = controller;
  for (const id of ["send", "race-start", "new-chat"]) $(id).disabled = running !== null;
  for (const id of ["stop", "race-stop"]) $(id).disabled = running === null;
  $("replay").disabled = running !== null || !race.done;
}

function bubble(who, role) {
  $("welcome")?.remove();
  const out = make("article", `said ${role}`);
  out.setAttribute("aria-label", who);
  const text = make("div", "text");
  text.dir = "auto";
  out.append(make("div", "who", who), text);
  $("log").append(out);
  return { box: out, text };
}

async function send(text) {
  if (running || !text.trim()) return;
  clearError();
  hideCard();
  const plain = isPlain();
  const own = bubble(plain ? "Prompt" : "You", "user");
  own.text.textContent = text;
  const reply = bubble(plain ? "Continuation" : "Answer", "model");
  reply.text.classList.add("waiting");
  $("log").scrollTop = $("log").scrollHeight;
  const answer = new Answer(reply.text, $("log"), true);
  answers.push(answer);
  watch(answer);
  $("message").value = "";
  setRunning(new AbortController());
  const what = plain ? { prompt: text, logprobs: 4 } : chatFields([...messages, { role: "user", content: text }]);
  try {
    const end = await follow(answer, pathOf(plain), { ...asked(), ...what }, running.signal);
    finish(answer, reply, end);
  } catch (error) {
    failed(error, answer, own, reply, text);
  } finally {
    reply.text.classList.remove("waiting");
    setRunning(null);
  }
  if (answer.count && !plain) messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
}

const chatFields = (all) => ({ messages: all, logprobs: true, top_logprobs: 4 });

/** Reads one answer to its end -> what the last events told. */
async function follow(answer, path, body, signal) {
  const began = performance.now();
  const end = { began };
  for await (const event of stream(path, body, signal)) {
    const at = performance.now() - began;
    for (const choice of event.choices) {
      if (choice.speculation?.tokens.length) end.first ??= { at, count: choice.speculation.tokens.length };
      answer.add(choice, at);
      end.reason = choice.finish_reason ?? end.reason;
      end.last = at;
    }
    end.usage = event.usage ?? end.usage;
    end.metrics = event.metrics ?? end.metrics;
    onEvent(answer);
  }
  return end;
}

/** Tokens per second from the first event on: what came before is the prompt's time. */
const speed = (count, first, last) => (first && last > first.at ? (1000 * (count - first.count)) / (last - first.at) : NaN);

function summary(answer, end) {
  const steps = answer.steps.length;
  const parts = [`${counted(answer.count, "token")} in ${counted(steps, "step")}`];
  if (steps) parts.push(`${fixed(answer.count / steps)} tokens per step`);
  const rate = end && speed(answer.count, end.first, end.last);
  if (rate) parts.push(`${fixed(rate, 1)} tokens/s`);
  const told = end?.metrics?.speculative_decoding;
  if (told?.drafted) parts.push(`${told.accepted} of ${told.drafted} drafted tokens accepted`);
  if (end?.reason === "length") parts.push("cut at the most tokens");
  return parts.join(", ") + ".";
}

function finish(answer, reply, end) {
  answer.flush();
  const words = summary(answer, end);
  reply.box.append(make("p", "foot quiet", words));
  announce(`Answer finished: ${words}`);
  drawBlock();
}

function failed(error, answer, own, reply, text) {
  answer.flush();
  if (answer.count) {
    const why = error.name === "AbortError" ? "Stopped" : "Broken off";
    reply.box.append(make("p", "foot quiet", `${why}: ${summary(answer)}`));
    announce(why);
  } else {
    own.box.remove();
    reply.box.remove();
    answers.splice(answers.indexOf(answer), 1);
    watch(answers.at(-1) ?? null);
    if (!$("message").value) $("message").value = text;
  }
  explain(error);
}

function explain(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) return askForKey();
  if (error.status === 400 && /chat template/i.test(error.message) && !isPlain()) {
    showError(error.message, { label: "Use plain completion", run: usePlain });
  } else {
    showError(error instanceof ServerSays ? error.message : `The page cannot read the answer: ${error.message}`);
  }
}

function usePlain() {
  $("mode").value = "plain";
  $("mode").dispatchEvent(new Event("change"));
  clearError();
  $("message").focus();
}

$("mode").addEventListener("change", () => {
  const what = isPlain() ? "Prompt" : "Message";
  $("message-label").textContent = what;
  $("message").placeholder = `${what}. Enter sends, Shift+Enter makes a new line`;
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("message").value);
});
function enterSends(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}
$("message").addEventListener("keydown", enterSends);
$("race-prompt").addEventListener("keydown", enterSends);
$("stop").addEventListener("click", () => running?.abort());

$("new-chat").addEventListener("click", () => {
  messages.length = answers.length = 0;
  $("log").replaceChildren();
  clearError();
  hideCard();
  roving = null;
  watch(null);
  drawBlock();
  $("message").focus();
});

for (const text of TRIES) {
  const button = make("button", "", text);
  button.type = "button";
  button.addEventListener("click", () => send(text));
  $("tries").append(button);
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  hideCard();
});

// ------------------------------------------------------------------ a token's card
let shown = null; // the span whose card is open
let hiding = 0;

function tokenFrom(target) {
  const span = target instanceof Element ? target.closest(".t") : null;
  return span && placeOf.has(span) ? span : null;
}

function showCard(span) {
  clearTimeout(hiding);
  if (shown === span) return;
  hideCard();
  shown = span;
  span.classList.add("shown");
  span.setAttribute("aria-describedby", "card");
  $("card").replaceChildren(...cardOf(placeOf.get(span)));
  $("card").hidden = false;
  placeCard(span);
}

function hideCard() {
  clearTimeout(hiding);
  shown?.classList.remove("shown");
  shown?.removeAttribute("aria-describedby");
  shown = null;
  $("card").hidden = true;
}

const hideSoon = () => {
  clearTimeout(hiding);
  hiding = setTimeout(hideCard, HIDE_MS);
};

/** Below the token, or above where there is no room; on a phone the style sheet puts it at the bottom. */
function placeCard(span) {
  const card = $("card");
  card.style.left = card.style.top = "";
  if (matchMedia("(max-width: 560px)").matches) return;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = card.getBoundingClientRect();
  const below = at.bottom + 8 + height < innerHeight;
  card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  card.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - height - 8)}px`;
}

function cardOf({ answer, number, place }) {
  const step = answer.steps[number];
  const told = step.told[place];
  const text = step.tokens[place] || told?.token || "";
  const out = [make("span", `token sample ${kindOf(step, place)}`, visible(text)), make("p", "", originInWords(step, place))];
  if (told) out.push(make("p", "", `Probability ${percent(told.p)}`));
  if (told?.top.length) out.push(make("h4", "", "Most likely here"), chances(told.top));
  const rejected = rejectedAt(step, place);
  if (rejected.length) out.push(make("h4", "", "Drafted here, and rejected"), rejects(step, rejected, told));
  out.push(make("p", "quiet", `Step ${number + 1}, token ${place + 1} of ${step.tokens.length} in it`));
  return out;
}

function chances(top) {
  const list = make("ul");
  for (const [text, p] of top) {
    const row = make("li");
    const meter = make("div", "meter");
    const fill = make("div");
    fill.style.width = `${100 * Math.min(1, p)}%`;
    meter.append(fill);
    row.append(make("span", "mono", visible(text)), meter, make("span", "num", percent(p)));
    list.append(row);
  }
  return list;
}

function rejects(step, nodes, told) {
  const list = make("ul");
  for (const node of nodes) {
    const text = step.draft.tokens[node];
    const chance = told?.top.find(([other]) => other === text);
    const row = make("li", "rejected");
    const by = step.draft.origins[node] ?? "a drafter";
    row.append(make("span", "mono", visible(text)), make("span", "quiet", chance ? `${by}, ${percent(chance[1])}` : by));
    list.append(row);
  }
  return list;
}

// ------------------------------------------------------------------ moving among tokens
let roving = null; // the one token that Tab reaches; arrows move on from it

function rove(span, focus) {
  if (roving && roving !== span) {
    roving.tabIndex = -1;
    roving.removeAttribute("role");
  }
  roving = span;
  span.tabIndex = 0;
  span.setAttribute("role", "button"); // Enter shows its step
  if (focus) span.focus();
}

/** The token beside this one, in its own answer or in the next. */
function beside(span, way) {
  const { answer } = placeOf.get(span);
  const sibling = way > 0 ? span.nextElementSibling : span.previousElementSibling;
  if (tokenFrom(sibling)) return sibling;
  const other = answers[answers.indexOf(answer) + way];
  return other && tokenFrom(way > 0 ? other.host.firstElementChild : other.host.lastElementChild);
}

function stepAway(span, way) {
  const { answer, number } = placeOf.get(span);
  for (let i = number + way; i >= 0 && i < answer.steps.length; i += way) {
    if (answer.steps[i]?.spans.length) return answer.steps[i].spans[0];
  }
  return null;
}

const MOVES = {
  ArrowRight: (span) => beside(span, 1),
  ArrowLeft: (span) => beside(span, -1),
  ArrowDown: (span) => stepAway(span, 1),
  ArrowUp: (span) => stepAway(span, -1),
  Home: (span) => tokenFrom(placeOf.get(span).answer.host.firstElementChild),
  End: (span) => tokenFrom(placeOf.get(span).answer.host.lastElementChild),
};

$("log").addEventListener("keydown", (event) => {
  const span = tokenFrom(event.target);
  if (!span) return;
  if (event.key === "Enter" || event.key === " ") pick(span);
  else if (!MOVES[event.key]) return;
  else {
    const next = MOVES[event.key](span);
    if (next) rove(next, true);
  }
  event.preventDefault();
});
$("log").addEventListener("focusin", (event) => {
  const span = tokenFrom(event.target);
  if (!span) return;
  rove(span, false);
  showCard(span);
});
$("log").addEventListener("focusout", hideSoon);
$("log").addEventListener("pointerover", (event) => {
  if (event.pointerType === "touch") return;
  const span = tokenFrom(event.target);
  if (span) showCard(span);
});
$("log").addEventListener("pointerout", (event) => {
  if (event.pointerType !== "touch" && tokenFrom(event.target)) hideSoon();
});
$("log").addEventListener("click", (event) => {
  const span = tokenFrom(event.target);
  if (!span) return;
  rove(span, true);
  showCard(span);
  pick(span);
});
function keepCard() {
  if (shown) placeCard(shown);
}
document.addEventListener("scroll", () => soon(keepCard), { capture: true, passive: true });
$("card").addEventListener("pointerenter", () => clearTimeout(hiding));
$("card").addEventListener("pointerleave", hideSoon);
document.addEventListener("pointerdown", (event) => {
  if (shown && !tokenFrom(event.target) && !$("card").contains(event.target)) hideCard();
});

// ------------------------------------------------------------------ steps and their trees
const view = { answer: null, step: 0, latest: true, marked: [] };

function watch(answer) {
  view.answer = answer;
  view.latest = true;
  view.step = 0;
  soon(drawStep);
}

function pick(span) {
  const { answer, number } = placeOf.get(span);
  view.answer = answer;
  goTo(number);
}

function goTo(number) {
  const most = view.answer.steps.length - 1;
  view.step = Math.max(0, Math.min(number, most));
  view.latest = view.step === most;
  soon(drawStep);
}

function drawStep() {
  const steps = view.answer?.steps ?? [];
  if (view.latest) view.step = Math.max(0, steps.length - 1);
  const range = $("step");
  range.max = Math.max(0, steps.length - 1);
  range.value = view.step;
  range.disabled = steps.length < 2;
  $("step-back").disabled = view.step === 0;
  $("step-on").disabled = view.step >= steps.length - 1;
  $("step-label").textContent = steps.length ? `step ${view.step + 1} of ${steps.length}` : "no steps yet";
  range.setAttribute("aria-valuetext", $("step-label").textContent);
  markStep(steps[view.step]);
  if (steps[view.step]) drawTree(steps[view.step], before(steps, view.step));
  else drawNoTree();
}

const NO_TREE = $("tree-summary").textContent;

function drawNoTree() {
  $("tree").replaceChildren();
  $("tree-summary").textContent = NO_TREE;
}

function markStep(step) {
  for (const span of view.marked) span.classList.remove("picked");
  view.marked = step && !view.latest ? [...step.spans] : [];
  for (const span of view.marked) span.classList.add("picked");
}

/** The token that the tree grows from. */
const before = (steps, number) => (number ? (steps[number - 1]?.tokens.at(-1) ?? "") : null);

$("step").addEventListener("input", () => goTo(Number($("step").value)));
$("step-back").addEventListener("click", () => goTo(view.step - 1));
$("step-on").addEventListener("click", () => goTo(view.step + 1));

/** The target's own token at the end of a step; none where the answer ended inside the draft. */
function ownToken(step) {
  const place = step.draft.accepted.length;
  if (place >= step.tokens.length) return null;
  return step.tokens[place] || step.told[place]?.token || "(end)";
}

function inWords(step) {
  const { tokens, origins, accepted } = step.draft;
  const own = ownToken(step);
  const wrote = own === null ? "" : ` the model wrote ${quoted(own)}`;
  if (!tokens.length) return `Nothing was drafted in this step:${wrote}.`;
  const by = [...new Set(origins)].join(" and ") || "a drafter";
  const taken = accepted.map((node) => quoted(tokens[node])).join(" ");
  const right = accepted.length ? `${accepted.length} accepted (${taken})` : "none accepted";
  return `${counted(tokens.length, "token")} drafted by ${by}, ${right}${wrote ? `; then${wrote}` : ""}.`;
}

/** Nodes with rows and columns: the accepted path runs straight on top, what was rejected branches off below. */
function layOut(step, rootText) {
  const { tokens, parents, origins, accepted } = step.draft;
  const path = new Set(accepted);
  const root = { text: rootText === null ? "start" : visible(rootText), kind: "root", children: [], taken: true };
  const nodes = tokens.map((text, i) => {
    const by = origins[i] ?? "a drafter";
    const fate = path.has(i) ? "accepted" : "rejected";
    return { text: visible(text), kind: colourOf(by), children: [], taken: path.has(i), title: `${by}, ${fate}` };
  });
  nodes.forEach((node, i) => (parents[i] < 0 ? root : nodes[parents[i]]).children.push(node));
  const own = ownToken(step);
  if (own !== null) {
    const end = accepted.length ? nodes[accepted.at(-1)] : root;
    end.children.push({ text: visible(own), kind: "end", children: [], taken: true, title: "the model's own" });
  }
  let rows = 0;
  const set = (node, depth, row) => {
    node.depth = depth;
    node.row = row;
    node.children.sort((a, b) => b.taken - a.taken);
    node.children.forEach((child, i) => set(child, depth + 1, i ? ++rows : row));
  };
  set(root, 0, 0);
  return { root, rows: rows + 1 };
}

function flat(node) {
  return [node, ...node.children.flatMap(flat)];
}

const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f300}-\u{1faff}]/u;
const widthOf = (text) => Array.from(text).reduce((sum, c) => sum + (WIDE.test(c) ? 13 : 7.4), 14);
const ROW = 34;
const GAP = 22;
const BOX = 24;

function drawTree(step, rootText) {
  const { root, rows } = layOut(step, rootText);
  const nodes = flat(root);
  for (const node of nodes) {
    node.label = clip(node.text, LABEL) || "∅";
    node.width = widthOf(node.label);
  }
  const lefts = columns(nodes);
  const words = inWords(step);
  const width = lefts.at(-1);
  const height = rows * ROW + 12;
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Draft tree. ${words}` });
  for (const node of nodes) for (const child of node.children) svg.append(linkOf(node, child, lefts));
  for (const node of nodes) svg.append(nodeOf(node, lefts));
  $("tree").replaceChildren(svg);
  $("tree-summary").textContent = words;
}

/** Where each column begins, and last of all where the drawing ends. */
function columns(nodes) {
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const lefts = [8];
  for (const width of widths) lefts.push(lefts.at(-1) + width + GAP);
  lefts[lefts.length - 1] -= GAP - 8;
  return lefts;
}

const middle = (node) => node.row * ROW + ROW / 2 + 6;

function linkOf(node, child, lefts) {
  const [x0, y0] = [lefts[node.depth] + node.width, middle(node)];
  const [x1, y1] = [lefts[child.depth], middle(child)];
  const turn = x1 - GAP / 2;
  const d = y0 === y1 ? `M${x0} ${y0}H${x1}` : `M${x0} ${y0}H${turn - 6}Q${turn} ${y0} ${turn} ${y0 + 6}V${y1 - 6}Q${turn} ${y1} ${x1} ${y1}`;
  return draw("path", { class: child.taken ? "link taken" : "link", d });
}

function nodeOf(node, lefts) {
  const group = draw("g", { class: `node ${node.kind}${node.taken && node.kind !== "root" ? " taken" : ""}` });
  const [x, y] = [lefts[node.depth], middle(node)];
  const rx = node.kind === "end" ? BOX / 2 : 5; // the model's own token is round
  group.append(
    draw("title", {}, node.title ? `${node.text}: ${node.title}` : "The text so far"),
    draw("rect", { x, y: y - BOX / 2, width: node.width, height: BOX, rx }),
    draw("text", { x: x + node.width / 2, y: y + 4, "text-anchor": "middle" }, node.label),
  );
  return group;
}

// ------------------------------------------------------------------ charts
const CHART = { width: 400, height: 120, left: 34, bottom: 18, top: 8, right: 6 };

/** 1, 2 or 5 times a power of ten, at least this. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((k) => k * power).find((k) => k >= value) ?? value;
}

function frame(most, label, digits, least = 0) {
  const { width, height, left, bottom, top, right } = CHART;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const y = (v) => height - bottom - ((v - least) / (most - least)) * (height - bottom - top);
  for (const v of [least, (least + most) / 2, most]) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
    svg.append(draw("text", { x: left - 5, y: y(v) + 4, "text-anchor": "end" }, v.toFixed(digits)));
  }
  return { svg, y };
}

/** Values from left to right, the newest at the right edge. */
function lineChart(host, values, { label, least = 0, ends, room, even }) {
  const { width, height, left, bottom, right } = CHART;
  const most = Math.max(least + 1, niceAbove(Math.max(...values, least)));
  const { svg, y } = frame(most, label, most - least < 10 ? 1 : 0, least);
  const gap = (width - left - right) / Math.max(1, (room ?? values.length) - 1);
  const begin = width - right - gap * (values.length - 1);
  const points = values.map((v, i) => `${(begin + i * gap).toFixed(1)} ${y(v).toFixed(1)}`);
  if (even !== undefined) svg.append(draw("line", { class: "even", x1: left, x2: width - right, y1: y(even), y2: y(even) }));
  if (points.length > 1) {
    const ground = y(least);
    svg.append(draw("path", { class: "area", d: `M${begin} ${ground}L${points.join("L")}V${ground}Z` }));
    svg.append(draw("path", { class: "curve", d: `M${points.join("L")}` }));
  }
  svg.append(draw("text", { x: left, y: height - 4 }, ends[0]));
  svg.append(draw("text", { x: width - right, y: height - 4, "text-anchor": "end" }, ends[1]));
  host.replaceChildren(svg);
}

const rates = [];

function drawRates() {
  const now = rates.at(-1) ?? 0;
  $("rate-now").textContent = `${fixed(now, 1)} now`;
  const label = `Tokens per second of the whole server over the last ${counted(rates.length, "second")}: ${fixed(now, 1)} now.`;
  lineChart($("rate"), rates, { label, ends: [`${KEPT_SAMPLES} s ago`, "now"], room: KEPT_SAMPLES });
}

/** Tokens per step over the steps of all answers in this conversation. */
function drawBlock() {
  const sizes = answers.flatMap((a) => a.steps.map((s) => s.tokens.length));
  const total = sizes.reduce((a, b) => a + b, 0);
  const mean = total / sizes.length;
  $("block-now").textContent = sizes.length ? `${fixed(mean)} tokens per step` : "";
  const points = moving(sizes);
  const label = sizes.length ? `Block efficiency over ${counted(sizes.length, "step")}: ${fixed(mean)} tokens per step.` : "No steps yet.";
  lineChart($("block"), points, { label, least: 0, even: 1, ends: ["first step", "last step"] });
}

const MOST_POINTS = 400; // more than these nobody can see

function moving(sizes) {
  const every = Math.max(1, Math.ceil(sizes.length / MOST_POINTS));
  const out = [];
  let sum = 0;
  sizes.forEach((size, i) => {
    sum += size - (i >= WINDOW ? sizes[i - WINDOW] : 0);
    if (i % every === 0 || i === sizes.length - 1) out.push(sum / Math.min(i + 1, WINDOW));
  });
  return out;
}

function drawPositions(told) {
  const rows = Object.entries(told).filter(([, d]) => d.drafts);
  if (!rows.length) return;
  $("positions").replaceChildren(...rows.map(([name, d]) => positionsOf(name, d)));
}

function positionsOf(name, told) {
  const box = make("div", `places ${colourOf(name)}`);
  const rate = `${told.accepted} of ${told.drafted} drafted tokens accepted (${percent(told.accepted / told.drafted)})`;
  const title = make("p");
  title.append(make("span", `sample drafted ${colourOf(name)}`, name), make("span", "quiet", ` ${rate}`));
  const last = Math.max(0, ...Object.keys(told.accepted_by_position).map(Number));
  const shares = Array.from({ length: last + 1 }, (_, i) => (told.accepted_by_position[i] ?? 0) / told.drafts);
  box.append(title, barsOf(shares, `Acceptance of ${name} by position: ${shares.map(percent).join(", ")}.`));
  return box;
}

function barsOf(shares, label) {
  const [width, height, base] = [400, 78, 62];
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const slot = width / Math.max(8, shares.length);
  svg.append(draw("line", { class: "grid", x1: 0, x2: width, y1: base, y2: base }));
  shares.forEach((share, i) => {
    const tall = Math.max(1, Math.min(1, share) * (base - 16));
    const x = i * slot + slot * 0.15;
    const centre = i * slot + slot / 2;
    svg.append(draw("rect", { class: "column", x, y: base - tall, width: slot * 0.7, height: tall, rx: 2 }));
    svg.append(draw("text", { x: centre, y: base - tall - 4, "text-anchor": "middle" }, slot > 30 ? percent(share) : ""));
    svg.append(draw("text", { x: centre, y: height - 2, "text-anchor": "middle" }, String(i + 1)));
  });
  return svg;
}

// ------------------------------------------------------------------ what the server tells about itself
let latest = null;
let polling = 0;

async function poll() {
  clearTimeout(polling);
  if (document.hidden) return;
  let wait = POLL_MS;
  try {
    heard(await (await ask("stats")).json());
  } catch (error) {
    if (error.status === 401) return askForKey(); // goes on with the key
    $("about").textContent = error.status === 0 ? "The server cannot be reached." : error.message;
    latest = null;
    wait = 3 * POLL_MS;
  }
  clearTimeout(polling);
  polling = setTimeout(poll, wait);
}

function heard(told) {
  const same = latest && told.tokens >= latest.tokens && told.seconds_up > latest.seconds_up; // else it began anew
  if (same) rates.push((told.tokens - latest.tokens) / (told.seconds_up - latest.seconds_up));
  if (rates.length > KEPT_SAMPLES) rates.shift();
  latest = told;
  const waits = told.waiting ? `, ${told.waiting} waiting` : "";
  const doing = told.running ? `${told.running} running${waits}` : "idle";
  setText($("about"), `${told.model}, version ${told.version}, ${doing}`);
  told.can_draft.forEach(colourOf);
  offerMethods(told.can_draft);
  drawRates();
  drawPositions(told.drafters);
  tellWhy(told.why);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function offerMethods(names) {
  const known = [...$("method").options].map((o) => o.value);
  for (const name of names) if (!known.includes(name)) $("method").append(new Option(name, name));
}

/** Only what changed is touched, so that a reader keeps the place. */
function tellWhy(sentences) {
  const list = $("why");
  while (list.children.length > sentences.length) list.lastElementChild.remove();
  sentences.forEach((text, i) => {
    if (list.children[i]) setText(list.children[i], text);
    else list.append(make("li", "", text));
  });
}

document.addEventListener("visibilitychange", poll);

let blockDrawn = 0;
function onEvent(answer) {
  if (!answers.includes(answer)) return; // a lane of the race
  if (view.answer === answer && view.latest) soon(drawStep);
  else if (view.answer === answer) soon(drawRange);
  if (performance.now() - blockDrawn < 400) return;
  blockDrawn = performance.now();
  soon(drawBlock);
}

/** The answer grows while an earlier step is looked at. */
function drawRange() {
  const last = view.answer.steps.length - 1;
  $("step").max = last;
  $("step-on").disabled = view.step >= last;
  $("step-label").textContent = `step ${view.step + 1} of ${last + 1}`;
}

// ------------------------------------------------------------------ the race
const race = { done: null };

function laneOf(id) {
  const part = (name) => $(id).querySelector(`[data-part="${name}"]`);
  return { clock: part("clock"), bar: part("bar").firstElementChild, text: part("text") };
}
const LANES = { plain: laneOf("lane-plain"), fast: laneOf("lane-fast") };

function resetLane(lane, words) {
  lane.text.replaceChildren();
  lane.clock.textContent = words;
  lane.bar.style.width = "0";
}

function showLane(lane, { seconds, count, share }) {
  const rate = seconds > 0 ? `, ${fixed(count / seconds, 1)} tokens/s` : "";
  setText(lane.clock, `${fixed(seconds, 1)} s, ${counted(count, "token")}${rate}`);
  lane.bar.style.width = `${100 * Math.min(1, share)}%`;
}

/** One run with the machine to itself -> what was recorded of it. */
async function run(lane, speculative, path, what, most) {
  const answer = new Answer(lane.text, lane.text);
  const events = []; // when, and which pieces came
  const began = performance.now();
  const add = answer.add.bind(answer);
  answer.add = (choice, at) => {
    add(choice, at);
    events.push({ at, choice, count: answer.count });
    soon(tick);
  };
  const tick = () => {
    const seconds = (performance.now() - began) / 1000;
    showLane(lane, { seconds, count: answer.count, share: answer.count / most });
  };
  const end = await follow(answer, path, { ...what, speculative }, running.signal);
  const seconds = end.last / 1000;
  answer.flush();
  due.delete(tick);
  showLane(lane, { seconds, count: answer.count, share: 1 });
  return { answer, events, end, seconds, rate: answer.count / seconds, steps: answer.steps.length };
}

async function startRace() {
  const prompt = $("race-prompt").value;
  if (running || !prompt.trim()) return;
  clearError();
  $("verdict").replaceChildren();
  cancelAnimationFrame(race.frame);
  race.done = null;
  resetLane(LANES.plain, "runs first");
  resetLane(LANES.fast, "waits for plain decoding to finish");
  const own = asked();
  const what = { ...own, seed: own.seed ?? RACE_SEED, ...(isPlain() ? { prompt } : { messages: [{ role: "user", content: prompt }] }) };
  const chosen = own.speculative?.method ? own.speculative : undefined; // "off" would be plain against plain
  const busy = latest?.running > 0;
  setRunning(new AbortController());
  try {
    const most = own.max_tokens ?? 256;
    const plain = await run(LANES.plain, { enabled: false }, pathOf(isPlain()), what, most);
    const fast = await run(LANES.fast, chosen, pathOf(isPlain()), what, plain.answer.count);
    race.done = { plain, fast, busy };
    judge();
  } catch (error) {
    if (error.name === "AbortError") $("verdict").append(make("p", "", "The race was stopped."));
    explain(error);
  } finally {
    setRunning(null);
  }
}

function judge() {
  const { plain, fast } = race.done;
  const head = make("p");
  head.append(make("strong", "", ruling(fast.rate / plain.rate)));
  const same = make("p", "", comparison(plain.answer.text, fast.answer.text));
  const notes = caveats(race.done).map((text) => make("p", "quiet", text));
  $("verdict").replaceChildren(head, tableOf(plain, fast), same, ...notes);
}

function ruling(ratio) {
  if (!Number.isFinite(ratio)) return "The answers are too short to tell a speed.";
  if (ratio < 0.995) return `Speculative decoding was slower here: ${fixed(ratio)} times the speed of plain.`;
  return `Speculative decoding was ${fixed(ratio)} times as fast.`;
}

const cachedIn = (record) => record.end.usage?.prompt_tokens_details?.cached_tokens ?? 0;
const MEMORY = "suffix"; // the drafter that remembers other answers

/** What may have favoured one of the two. */
function caveats({ plain, fast, busy }) {
  const out = [];
  if (busy) out.push("Somebody else was using this server when the race began: the times may not be fair.");
  const more = cachedIn(fast) - cachedIn(plain);
  if (more > 0) out.push(`The second run found ${counted(more, "more token")} of the prompt in the cache.`);
  if (fast.end.metrics?.speculative_decoding.by_drafter[MEMORY]?.accepted) {
    out.push(`${MEMORY} remembers answers that were made with speculation: where this prompt was asked before, it knows the text.`);
  }
  return out;
}

function tableOf(plain, fast) {
  const rows = [
    ["Time", (r) => `${fixed(r.seconds)} s`],
    ["To the first token", (r) => `${fixed((r.end.first?.at ?? NaN) / 1000)} s`],
    ["Tokens", (r) => String(r.answer.count)],
    ["Tokens per second", (r) => fixed(r.rate, 1)],
    ["From the first token on", (r) => fixed(speed(r.answer.count, r.end.first, r.end.last), 1)],
    ["Steps", (r) => String(r.steps)],
    ["Tokens per step (block efficiency)", (r) => fixed(r.answer.count / r.steps)],
  ];
  const table = make("table");
  const head = make("tr");
  head.append(make("th", "", ""), make("th", "", "Plain"), make("th", "", "Speculative"));
  table.append(head);
  for (const [name, of] of rows) {
    const row = make("tr");
    const title = make("th", "", name);
    title.scope = "row";
    row.append(title, make("td", "", of(plain)), make("td", "", of(fast)));
    table.append(row);
  }
  return table;
}

function comparison(a, b) {
  if (a === b) return "Both wrote the same text, character for character.";
  const [one, two] = [Array.from(a), Array.from(b)];
  let at = 0;
  while (at < one.length && at < two.length && one[at] === two[at]) at++;
  const rest = (all) => (at < all.length ? quoted(all.slice(at, at + 20).join("")) : "nothing more");
  return `The texts differ, first at character ${at + 1}: plain has ${rest(one)}, speculative has ${rest(two)}.`;
}

/** Both from their recorded times, at the speed they had. */
function replay() {
  const { plain, fast } = race.done;
  cancelAnimationFrame(race.frame);
  const lanes = [[LANES.plain, plain], [LANES.fast, fast]].map(([lane, record]) => {
    resetLane(lane, "");
    return { lane, record, next: 0, answer: new Answer(lane.text, lane.text) };
  });
  const began = performance.now();
  const tick = () => {
    const now = performance.now() - began;
    const open = lanes.map((one) => playUntil(one, now)).some(Boolean);
    race.frame = open ? requestAnimationFrame(tick) : 0;
  };
  tick();
}

/** True while something is still to come. */
function playUntil(one, now) {
  const { record, answer, lane } = one;
  while (one.next < record.events.length && record.events[one.next].at <= now) answer.add(record.events[one.next++].choice, 0);
  const ended = one.next === record.events.length;
  const seconds = ended ? record.seconds : now / 1000;
  showLane(lane, { seconds, count: answer.count, share: answer.count / Math.max(1, record.answer.count) });
  return !ended;
}

$("race-form").addEventListener("submit", (event) => {
  event.preventDefault();
  startRace();
});
$("race-stop").addEventListener("click", () => running?.abort());
$("replay").addEventListener("click", replay);

// ------------------------------------------------------------------ tabs and theme
const TABS = ["chat", "race"];

function openTab(name, focus) {
  hideCard();
  for (const tab of TABS) {
    const button = $(`tab-${tab}`);
    button.setAttribute("aria-selected", String(tab === name));
    button.tabIndex = tab === name ? 0 : -1;
    $(tab).hidden = tab !== name;
  }
  if (focus) $(`tab-${name}`).focus();
}

for (const [i, tab] of TABS.entries()) {
  $(`tab-${tab}`).addEventListener("click", () => openTab(tab));
  $(`tab-${tab}`).addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") openTab(TABS[1 - i], true);
  });
}

const THEMES = { "": ["◐", "as the system has it"], light: ["☀", "light"], dark: ["☾", "dark"] };

function setTheme(name) {
  const theme = name in THEMES ? name : "";
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const [sign, words] = THEMES[theme];
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", `Theme: ${words}`);
  $("theme").title = `Theme: ${words}`;
  stored("localStorage", THEME, theme);
}

/** First the one that is not on the screen now, then the other, then the system's again. */
$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "";
  const other = matchMedia("(prefers-color-scheme: dark)").matches ? ["light", "dark"] : ["dark", "light"];
  const order = ["", ...other];
  setTheme(order[(order.indexOf(now) + 1) % order.length]);
});

// ------------------------------------------------------------------ begin
setTheme(stored("localStorage", THEME) || "");
$("race-prompt").value = RACE_PROMPT;
drawLegend();
drawRates();
drawBlock();
poll();
