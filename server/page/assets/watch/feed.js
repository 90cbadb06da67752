// Reads /watch while the view is shown.

const RETRY_MS = 1000;

/** Calls `onState(told)` with each state, `onOutage(reason)` when there is none, and of several
    engines `onFleet(told)` with how they are, until `signal` aborts. `replica`: which of them; null:
    the first. A stream that breaks off is begun anew. */
export async function follow(api, signal, replica, { onState, onFleet, onOutage }) {
  const path = replica === null ? "/watch" : `/watch?replica=${replica}`;
  while (!signal.aborted) {
    let isOut = false;
    try {
      for await (const { event, data } of api.events(path, { signal })) {
        if (signal.aborted) return;
        const told = JSON.parse(data);
        if (event === "fleet") {
          onFleet(told);
          continue;
        }
        isOut = event !== "state";
        if (isOut) onOutage(told.reason);
        else onState(told);
      }
      if (!isOut) onOutage("the server has ended the stream");
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      onOutage(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}
