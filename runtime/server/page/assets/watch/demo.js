// Something to look at: a few requests that share prefixes and fork, as programs do.

const SYSTEM = "You are the librarian of a small library by the sea. You answer in two or three plain sentences, and you always name one book that the reader might like. ";
const SHELVES = ["Novels", "Maps and atlases", "Old manuscripts"];
const QUESTIONS = ["What should I read on a rainy day?", "Which book is the oldest here?", "Who borrowed the blue atlas?", "Can you tell me a story about the sea?"];
const WAVES = 4;
const PAUSE_MS = 900;

/** Sends the requests, in waves that go on from what the earlier ones made; resolves when all have
    ended. Raises ApiError, AbortError. */
export async function runDemo(api, signal) {
  let prefixes = SHELVES.map((shelf) => `${SYSTEM}\nShelf: ${shelf}.\n`);
  const running = [];
  for (let wave = 0; wave < WAVES; wave++) {
    const asked = prefixes.flatMap((prefix) => QUESTIONS.slice(0, 4 - Math.min(wave, 2)).map((question) => `${prefix}Reader: ${question}\nLibrarian:`));
    const answers = asked.map((prompt, i) => complete(api, signal, prompt, 40 + 12 * (i % 4)));
    running.push(...answers);
    const firsts = await Promise.all(answers.filter((_, i) => i % 4 === wave % 2));
    prefixes = firsts.slice(0, 4);
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
  await Promise.all(running);
}

async function complete(api, signal, prompt, maxTokens) {
  const body = { prompt, max_tokens: maxTokens, temperature: 0.9, stop: ["\nReader:"] };
  const answer = await api.json("/v1/completions", { body, signal });
  return `${prompt}${answer.choices[0].text}\n`;
}
