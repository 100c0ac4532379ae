// Elements from data. Text only ever becomes a text node, so that no name from a contract or a sender is markup.

/** An element: attributes, `on` for listeners; children are elements, text, or nothing. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

/**
 * Make a parent's children say `items`, touching only what differs: focus and a screen reader's place survive.
 * `key` names an item, `mark` is what its looks depend on, `make` builds it; what can have focus in it has a data-focus.
 */
export function sync(parent, items, key, mark, make) {
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const held = focused && { item: [...parent.children].find((child) => child.contains(focused)).dataset.key, part: focused.dataset.focus };
  const have = new Map();
  for (const child of parent.children) have.set(child.dataset.key, child);
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    const looks = mark(item);
    let node = have.get(name);
    have.delete(name);
    if (!node || node.dataset.mark !== looks) {
      const fresh = make(item);
      fresh.dataset.key = name;
      fresh.dataset.mark = looks;
      if (place === node && node) place = fresh;
      node?.replaceWith(fresh);
      node = fresh;
    }
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const node of have.values()) node.remove();
  if (!focused || document.activeElement === focused) return;
  const now = [...parent.children].find((child) => child.dataset.key === held.item);
  const same = held.part && now?.querySelector(`[data-focus="${CSS.escape(held.part)}"]`);
  (same ?? (now?.matches("[data-focus]") ? now : null))?.focus({ preventScroll: true });
}

/** Replace an element's children. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}
