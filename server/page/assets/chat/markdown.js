// Markdown as DOM nodes: the blocks and inline forms that models write. Markup in the text stays
// text; links lead to http(s) only; nothing is loaded. While a text grows, blocks that are done keep
// their elements.

import { h } from "../dom.js";
import { copyButton } from "./copy.js";

const MAX_DEPTH = 6; // of lists and quotes
const MAX_INLINE = 20_000; // characters of one paragraph that are searched for inline forms
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;
const INLINE = new RegExp([
  String.raw`\\(?<escaped>[\\${"`"}*_{}\[\]()#+\-.!|~<>])`,
  String.raw`(?<ticks>${"`"}{1,3})(?<code>.{1,2000}?)\k<ticks>(?!${"`"})`,
  String.raw`\*\*(?=\S)(?<bold>.{0,2000}?\S)\*\*`,
  String.raw`~~(?=\S)(?<struck>.{0,2000}?\S)~~`,
  String.raw`\*(?=[^\s*])(?<italic>.{0,2000}?[^\s*])\*(?!\*)`,
  String.raw`(?<![\w_])_(?=[^\s_])(?<under>.{0,2000}?[^\s_])_(?![\w_])`,
  String.raw`\[(?<label>[^\[\]\n]{1,500})\]\((?<target>[^()\s]{1,2000})\)`,
  String.raw`(?<bare>\bhttps?:\/\/[^\s<>"'${"`"}]{1,2000}[^\s<>"'${"`"}.,;:!?)\]])`,
].join("|"), "gsu");
const sources = new WeakMap();

/** Shows `text` in `parent`; called again, it changes only the blocks that have changed. */
export function showMarkdown(parent, text) {
  const blocks = split(text);
  blocks.forEach((block, index) => {
    const present = parent.children[index];
    if (present && sources.get(present) === block.source) return;
    const element = render(block, 0);
    sources.set(element, block.source);
    if (present) present.replaceWith(element);
    else parent.append(element);
  });
  while (parent.children.length > blocks.length) parent.lastElementChild.remove();
}

/** The address of a link, or null where it may not lead there. */
export function safeAddress(target) {
  try {
    const url = new URL(target);
    return ["http:", "https:"].includes(url.protocol) ? url.href : null;
  } catch { return null; }
}

function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const [kind, end] = blockAt(lines, at);
    const own = lines.slice(at, end);
    blocks.push({ kind, lines: own, source: `${kind}\n${own.join("\n")}` });
    at = end;
  }
  return blocks;
}

/** Its kind, and where the block that begins at `at` ends. */
function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) {
    const isEnd = (other) => other.trim().startsWith(fence[1]) && !other.trim().slice(fence[1].length).replaceAll(fence[1][0], "");
    const close = lines.findIndex((other, index) => index > at && isEnd(other));
    return ["fence", close < 0 ? lines.length : close + 1];
  }
  if (RULE.test(line)) return ["rule", at + 1];
  if (HEADING.test(line)) return ["heading", at + 1];
  if (line.trimStart().startsWith(">")) return ["quote", endOf(lines, at, (other) => other.trimStart().startsWith(">"))];
  if (ITEM.test(line)) return ["list", endOfList(lines, at)];
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) return ["table", endOf(lines, at, (other) => other.includes("|"))];
  const goesOn = (other, index) => other.trim() && !FENCE.test(other) && !HEADING.test(other) && !ITEM.test(other)
    && !other.trimStart().startsWith(">") && !(other.includes("|") && TABLE_RULE.test(lines[index + 1] ?? ""));
  return ["paragraph", endOf(lines, at, goesOn)];
}

function endOf(lines, at, goesOn) {
  let end = at + 1;
  while (end < lines.length && goesOn(lines[end], end)) end++;
  return end;
}

function endOfList(lines, at) {
  const isMore = (line) => ITEM.test(line) || /^\s{2,}\S/.test(line);
  return endOf(lines, at, (line, index) => isMore(line) || (!line.trim() && isMore(lines[index + 1] ?? "")));
}

function render({ kind, lines }, depth) {
  switch (kind) {
    case "fence": return fence(lines);
    case "rule": return h("hr");
    case "heading": return heading(lines[0]);
    case "quote": return h("blockquote", {}, ...nested(lines.map((line) => line.replace(/^\s*> ?/, "")), depth));
    case "list": return list(lines, depth);
    case "table": return table(lines);
    default: return h("p", {}, ...inline(lines.join("\n")));
  }
}

function nested(lines, depth) {
  if (depth >= MAX_DEPTH) return [h("p", { text: lines.join("\n") })];
  return split(lines.join("\n")).map((block) => render(block, depth + 1));
}

function fence(lines) {
  const [, mark, language] = FENCE.exec(lines[0]);
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", { text: language || "text" }), copyButton(() => code, "Copy the code")),
    h("pre", { tabindex: "0" }, h("code", { text: code })));
}

function heading(line) {
  const [, marks, text] = HEADING.exec(line);
  return h(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text)); // the page's own come first
}

function list(lines, depth) {
  const first = ITEM.exec(lines.find((line) => ITEM.test(line)));
  const indent = first[1].length;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent) items.push([item[4]]);
    else items.at(-1).push(line.slice(Math.min(line.length - line.trimStart().length, indent + first[2].length + first[3].length)));
  }
  const isOrdered = /\d/.test(first[2]);
  const start = isOrdered ? Number.parseInt(first[2], 10) : null;
  return h(isOrdered ? "ol" : "ul", { start }, ...items.map((own) => h("li", {}, ...itemContent(own, depth))));
}

function itemContent(lines, depth) {
  const content = nested(lines, depth);
  const isTight = content[0]?.tagName === "P" && !lines.some((line) => !line.trim());
  return isTight ? [...content[0].childNodes, ...content.slice(1)] : content;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[1]).map((rule) => (/^:.*:$/.test(rule) ? "center" : rule.endsWith(":") ? "end" : "start"));
  const row = (line, tag) => h("tr", {}, ...cells(line).map((cell, i) => h(tag, { class: `to-${sides[i] ?? "start"}` }, ...inline(cell))));
  return h("div", { class: "table", tabindex: "0" }, h("table", {}, h("thead", {}, row(lines[0], "th")),
    h("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")))));
}

function inline(text, depth = 0) {
  if (text.length > MAX_INLINE || depth > MAX_DEPTH) return [text];
  const found = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) found.push(text.slice(end, match.index));
    found.push(form(match, depth));
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push(text.slice(end));
  return found;
}

function form(match, depth) {
  const { escaped, code, bold, struck, italic, under, label, target, bare } = match.groups;
  if (escaped) return escaped;
  if (code) return h("code", { text: code.trim() || code });
  if (bold) return h("strong", {}, ...inline(bold, depth + 1));
  if (struck) return h("s", {}, ...inline(struck, depth + 1));
  if (italic || under) return h("em", {}, ...inline(italic ?? under, depth + 1));
  const address = safeAddress(target ?? bare);
  if (!address) return match[0];
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address }, ...(label ? inline(label, depth + 1) : [bare]));
}
