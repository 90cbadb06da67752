// What the page's address names: "#/chat/ID", "#/watch/1", and without the slash as people type it.

/** The parts of the address after "#": the view, then what of it is meant. */
export function addressParts() {
  return location.hash.replace(/^#\/?/, "").split("/");
}
