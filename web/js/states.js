// The states of a node's line. Of what is known (`facts` of panel.js) the first state that holds is the one; nothing is
// remembered besides, so that whatever changes leads to the state that is right. docs/comfyui.md has the table.

/** [name, colour of its dot or null where a report or plan has it, whether it holds]. */
export const STATES = [
  ["away", "quiet", (facts) => facts.away],
  ["running", "busy", ({ run }) => run?.state === "running"],
  ["failed", "bad", ({ run }) => run?.state === "failed"],
  ["cancelled", "quiet", ({ run }) => run?.state === "cancelled"],
  ["ran", null, ({ report, same }) => Boolean(report) && same],
  ["cached", "quiet", ({ run, plans }) => !plans && run?.state === "cached"],
  ["changed", "quiet", ({ report, plans }) => !plans && Boolean(report)],
  ["new", "quiet", ({ plans }) => !plans],
  ["unknown", "quiet", ({ asked, answer }) => Boolean(asked.why || (answer?.plan?.unknown && !answer.plan.host))],
  ["planning", "quiet", ({ answer }) => !answer],
  ["unanswered", "quiet", ({ answer }) => answer.error === ""],
  ["foreign", "quiet", ({ answer }) => Boolean(answer.plan?.unknown)],
  ["refused", "bad", (facts) => Boolean(refusal(facts))],
  ["planned", null, () => true],
];

export function stateOf(facts) {
  const [name, mood] = STATES.find(([, , holds]) => holds(facts));
  return { name, mood };
}

/** Why the next run would fail: the key of a text, "error" for the server's own words, or null. */
export function refusal({ answer: { plan, error }, streams, readByUs }) {
  if (error) return "error";
  if (plan.ours_only && !readByUs) return "ours_only";
  if (plan.needs_channels) return "channels_short";
  if (!plan.fits) return "fits_not";
  if (streams) return plan.still || plan.batch > 1 ? "no_video" : null;
  if (plan.crowded) return plan.still || plan.batch > 1 ? "images_short" : "frames_short";
  return null;
}
