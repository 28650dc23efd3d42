// Keeps "Right now" on the start page up to date. Without it the page shows what was when it was loaded.
const shown = document.querySelector("[data-activity]");
const freshness = document.querySelector("[data-freshness]");
const EVERY = 1000; // ms
const PATIENCE = 10000; // ms, longer than the site waits for a server that is silent

let looking = false;
let timer;
let seenAt = new Date();

async function look() {
  if (looking || document.hidden) return;
  looking = true;
  clearTimeout(timer);
  try {
    const signal = AbortSignal.timeout(PATIENCE);
    const response = await fetch(shown.dataset.activity, { cache: "no-store", signal });
    if (!response.ok) throw new Error(response.statusText);
    show(await response.text());
    tell("live", "Live, every second");
  } catch {
    tell("stale", `The site does not answer: this is how it was at ${seenAt.toLocaleTimeString()}`);
  }
  looking = false;
  timer = setTimeout(look, EVERY);
}

function show(html) {
  seenAt = new Date();
  const focused = shown.contains(document.activeElement) && document.activeElement.id;
  const before = new Map([...shown.querySelectorAll("progress")].map((bar) => [bar.id, bar.value]));
  shown.innerHTML = html;
  for (const bar of shown.querySelectorAll("progress")) move(bar, before.get(bar.id));
  if (focused) document.getElementById(focused)?.focus();
}

function move(bar, from = bar.value) {
  const to = bar.value;
  bar.value = from;
  bar.getBoundingClientRect(); // drawn there, it glides on
  bar.value = to;
}

function tell(state, text) {
  if (freshness.textContent === text) return; // else it would be read out every second
  freshness.className = `freshness ${state}`;
  freshness.textContent = text;
}

document.addEventListener("visibilitychange", look);
look();
