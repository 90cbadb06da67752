// Who answers a conversation: a model that is served, or an adapter.

import { h, put } from "../dom.js";

export class ModelPicker {
  /** `choose(name)`, "" the first model; `refresh()`: the list is about to be opened. */
  constructor({ choose, refresh }) {
    this.element = h("select", { class: "model-picker", "aria-label": "Model", title: "The model, or an adapter",
      on: { change: () => choose(this.element.selectedIndex === 0 ? "" : this.element.value), focus: refresh } });
    this.shown = "";
  }

  /** `models`: {id, isAdapter}, the one that answers unless another is chosen first; `chosen`: "" or a name. */
  show(models, chosen) {
    const isGone = chosen && !models.some(({ id }) => id === chosen);
    const listed = JSON.stringify([models, isGone && chosen]);
    if (listed !== this.shown) { // else the list may be open
      this.shown = listed;
      const adapters = models.filter(({ isAdapter }) => isAdapter);
      put(this.element, ...models.filter(({ isAdapter }) => !isAdapter).map(({ id }) => h("option", { value: id, text: id })),
        adapters.length ? h("optgroup", { label: "Adapters" }, ...adapters.map(({ id }) => h("option", { value: id, text: id }))) : null,
        isGone ? h("option", { value: chosen, text: `${chosen} (not there)` }) : null);
    }
    this.element.value = chosen || models[0]?.id || "";
    this.element.hidden = !models.length;
  }
}
