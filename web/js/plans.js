// Plans from the server: each question is asked once, two at a time, however many nodes have it.
import { api } from "../../../scripts/api.js";

const ROUTE = "/zerowaste_vae/plan";
const MOST = 256;
const AT_ONCE = 2;
const PAUSE = 400;
// Until one that got no answer is asked again.
const LATER = 5000;
// Newer frontends give up on an answer after a minute.
const PATIENT = { timeoutMs: null };

const answers = new Map();
const waiting = [];
let running = 0;

/** The answer to a query: { plan } or { error }, or undefined while it is on its way. */
export function planFor(query) {
  const text = new URLSearchParams(query).toString();
  if (answers.has(text)) return answers.get(text);
  answers.set(text, undefined);
  if (answers.size > MOST) answers.delete(answers.keys().next().value);
  waiting.push(text);
  next();
  return undefined;
}

/** Whether the engine runs the VAE of this file, as far as anyone can say before it is loaded. */
export async function isKnown(model) {
  const size = { width: 64, height: 64, frames: 1 };
  const reply = await api.fetchApi(`${ROUTE}?${new URLSearchParams({ model, ...size })}`, PATIENT).catch(() => null);
  return Boolean(reply?.ok) && !(await reply.json()).unknown;
}

/** After a run the server may know more of a VAE than its name: what it had to assume is asked again. */
export function forgetAssumed() {
  for (const [text, answer] of answers) if (answer?.plan?.assumed || answer?.error) answers.delete(text);
}

/** Another server may have come, or the same one with other options. */
export function forgetPlans() {
  answers.clear();
}

async function next() {
  if (running >= AT_ONCE || !waiting.length) return;
  running += 1;
  const text = waiting.shift();
  let answer;
  try {
    const reply = await api.fetchApi(`${ROUTE}?${text}`, PATIENT);
    const plan = await reply.json();
    answer = reply.ok ? { plan } : { error: plan.error };
    if (reply.status === 429) {
      await new Promise((done) => setTimeout(done, PAUSE));
      answers.delete(text);
      answer = null;
    }
  } catch {
    answer = { error: "" };
    setTimeout(() => answers.delete(text), LATER);
  }
  if (answer) answers.set(text, answer);
  running -= 1;
  next();
}
