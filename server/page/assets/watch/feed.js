// Reads /watch while the view is shown.

const RETRY_MS = 1000;

/** Calls `onState(told)` with each state and `onOutage(reason)` when there is none, until `signal`
    aborts. A stream that breaks off is begun anew. */
export async function follow(api, signal, { onState, onOutage }) {
  while (!signal.aborted) {
    let isOut = false;
    try {
      for await (const { event, data } of api.events("/watch", { signal })) {
        const told = JSON.parse(data);
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
