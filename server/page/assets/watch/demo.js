// Something to look at: requests that share prefixes and fork, as programs do. Some pin or lease what
// they leave behind, and some are held to a grammar.

const SYSTEM = "You are the librarian of a small library by the sea. You answer in two or three plain sentences, and you always name one book that the reader might like. ";
const SHELVES = ["Novels", "Maps and atlases", "Old manuscripts"];
const QUESTIONS = ["What should I read on a rainy day?", "Which book is the oldest here?", "Who borrowed the blue atlas?", "Can you tell me a story about the sea?"];
const CARD = String.raw` The card says "(Moby-Dick|Ulysses|The Waves)", returned by (Anna|Piet|Yusuf) on day [0-9]{1,3}\.`;
const WAVES = 5;
const PAUSE_MS = 350;

/** Sends the requests in waves, each going on from what the one before has made; resolves when all
    have ended. Raises ApiError, AbortError. */
export async function runDemo(api, signal) {
  const running = [];
  let prefixes = SHELVES.map((shelf) => `${SYSTEM}\nShelf: ${shelf}.\n`);
  for (let wave = 0; wave < WAVES; wave++) {
    const asked = prefixes.flatMap((prefix, i) => QUESTIONS.slice(0, 4 - (wave % 3)).map((question, j) => ({ prefix, question, i, j })));
    const answers = asked.map(({ prefix, question, i, j }) => {
      const prompt = `${prefix}Reader: ${question}\nLibrarian:`;
      if (j === 2) return complete(api, signal, prompt, { regex: CARD, max_tokens: 60 });
      const hints = j === 0 && i < 2 ? hint(i ? "retain" : "pin") : undefined;
      return complete(api, signal, prompt, { max_tokens: 56 + 40 * ((i + j + wave) % 4), ignore_eos: true, kv_hints: hints });
    });
    for (const answer of answers) answer.catch(() => {}); // whoever waits for it below is told
    running.push(...answers);
    prefixes = (await Promise.all(answers.filter((_, i) => i % 4 === wave % 4))).slice(0, 3);
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
  await Promise.all(running);
}

function hint(kind) {
  const action = { action_id: kind, action_type: kind, action_version: 1, payload: { ttl_ms: 20_000 } };
  return { protocol_version: 1, message_id: "demo", actions: [action] };
}

async function complete(api, signal, prompt, fields) {
  const answer = await api.json("/v1/completions", { body: { prompt, temperature: 0.9, ...fields }, signal });
  return `${prompt}${answer.choices[0].text}\n`;
}
