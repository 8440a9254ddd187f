// What the server says, in the words of a dictionary: { its English: the translation }.

const NUMBER = /\d+(?:\.\d+)?/g;
const sentences = new WeakMap();

// Keys with {places} as patterns, in their order.
function patterns(known) {
  if (!sentences.has(known)) {
    const exact = (key) => key.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/\\\{(\w+)\\\}/g, "(?<$1>.+?)");
    const keys = Object.keys(known).filter((key) => /\{\w+\}/.test(key));
    sentences.set(known, keys.map((key) => [new RegExp(`^${exact(key)}$`), known[key]]));
  }
  return sentences.get(known);
}

/** `text` whole, with # for each of its numbers, or by a key with {places}, whose contents are translated as well. */
export function translated(text, known) {
  if (!known) return text;
  const numbers = text.match(NUMBER) ?? [];
  const found = known[text] ?? known[text.replace(NUMBER, "#")];
  if (found !== undefined) return found.replace(/#/g, () => numbers.shift());
  for (const [pattern, wording] of patterns(known)) {
    const places = pattern.exec(text)?.groups;
    if (places) return wording.replace(/\{(\w+)\}/g, (_, name) => translatedAll(places[name], known));
  }
  return text;
}

/** The same of several sentences with semicolons between them; what stands in brackets belongs to one. */
export function translatedAll(text, known) {
  const whole = translated(text, known);
  if (whole !== text) return whole;
  const parts = text.split(/; (?![^(]*\))/);
  const told = parts.map((part) => translated(part, known));
  return told.some((part, i) => part !== parts[i]) ? told.join(known["; "] ?? "; ") : text;
}
