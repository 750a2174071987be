// Enhances pages that are complete without it: it updates times, applies live updates, moves the focus by arrow keys, and offers to copy.
// Without this file every page, filter and form works the same.
//
// It morphs the DOM by itself rather than by idiomorph (0.8.0, 10 KiB). On the parts that change on a page of 10,000 tasks when 100 are
// lost, idiomorph took 5, 16 and 11 % longer in three runs (medians of 60 replacements of each part, Chromium). It also matches nodes by
// `id` alone: a row that comes in above others took over the open details of the row below it. Rows are matched here by `data-key`.

const body = document.body;
const byId = (id) => document.getElementById(id);

// Times. The server writes absolute times; their texts are updated here by the clock of the server, as the reader has chosen.
// `src/http/page_times.rs` has the same rules.
let ahead = Number(body.dataset.now) / 1000 - Date.now();
const serverNow = () => (Date.now() + ahead) / 1000;
const isLocal = () => body.dataset.times === 'local';
const zoneName = () => (isLocal() ? Intl.DateTimeFormat().resolvedOptions().timeZone : 'UTC');

const span = (seconds) => {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
};

// The end of the run that the page shows, in seconds, if a later run has opened: the states on the page lasted until then.
const endOfRun = Number(body.dataset.ended ?? Infinity) / 1e6;

// Returns the date, the time of day to the millisecond, and the zone, of a time in milliseconds.
const inZone = (ms) => {
  const shift = isLocal() ? -new Date(ms).getTimezoneOffset() : 0;
  const [date, time] = new Date(ms + shift * 60000).toISOString().slice(0, -1).split('T');
  const [hours, minutes] = [Math.floor(Math.abs(shift) / 60), Math.abs(shift) % 60].map((number) => String(number).padStart(2, '0'));
  return { date, time, zone: isLocal() ? `${shift < 0 ? '-' : '+'}${hours}:${minutes}` : 'UTC' };
};

const absolute = (ms) => {
  const { date, time, zone } = inZone(ms);
  return `${date === inZone(serverNow() * 1000).date ? '' : `${date} `}${time} ${zone}`;
};

// Returns the time of day, after its date if that is not the date of the other time. Before a time to the minute, the date has no year.
const timeOfDay = (form, ms, otherMs) => {
  const { date, time } = inZone(ms);
  const shown = form === 'minute' ? [date.slice(5), time.slice(0, 5)] : [date, time.slice(0, 8)];
  return otherMs !== undefined && inZone(otherMs).date !== date ? shown.join(' ') : shown[1];
};

const words = (relation) => {
  const [form, at, other] = relation.split(':');
  const ms = Math.floor(Number(at) / 1000);
  const since = serverNow() - Number(at) / 1e6;
  const lasted = Math.min(serverNow(), endOfRun) - Number(at) / 1e6;
  if (form === 'clock' || form === 'minute') return timeOfDay(form, ms, other && Math.floor(Number(other) / 1000));
  if (body.dataset.times !== 'relative') {
    if (form === 'ago') return absolute(ms);
    return form === 'in' ? `at ${absolute(ms)}` : `${span(lasted)}, since ${absolute(ms)}`;
  }
  if (form === 'ago') return since < 1 ? 'just now' : `${span(since)} ago`;
  if (form === 'in') return since >= 0 ? 'now' : `in ${span(-since)}`;
  return span(lasted);
};

const countOn = (within) => {
  for (const time of within.querySelectorAll('[data-rel]')) {
    const text = words(time.dataset.rel);
    if (time.textContent !== text) time.textContent = text;
  }
  for (const zone of within.querySelectorAll('[data-zone]')) {
    if (zone.textContent !== zoneName()) zone.textContent = zoneName();
  }
};

setInterval(() => document.hidden || countOn(document), 1000);

// The switch of times. The server keeps the choice in a cookie; the page changes in place.
for (const button of document.querySelectorAll('.times button[hidden]')) button.hidden = false;
document.addEventListener('submit', (event) => {
  const form = event.target.closest('.times');
  const to = event.submitter?.value;
  if (!form || !to) return;
  event.preventDefault();
  body.dataset.times = to;
  for (const button of form.querySelectorAll('button')) button.setAttribute('aria-pressed', button.value === to);
  countOn(document);
  draw(document);
  // The answer leads back to the page, which need not be loaded. If the server does not answer, the choice ends with the page. Leaving
  // the page does not end the request.
  fetch(`/times?to=${to}`, { redirect: 'manual', keepalive: true }).catch(() => {});
});

// Copying a time gives the exact one.
document.addEventListener('copy', (event) => {
  const selection = getSelection();
  if (!selection.rangeCount || event.target.closest?.('input, textarea')) return;
  const range = selection.getRangeAt(0);
  const times = [...document.querySelectorAll('time[data-rel]')].filter((time) => time.firstChild && range.intersectsNode(time));
  if (!times.length) return;
  const { startContainer, startOffset, endContainer, endOffset } = range;
  const [first, last] = [startContainer, endContainer].map((end) => times.find((time) => time.contains(end)));
  const shown = times.map((time) => time.firstChild.data);
  // If the selection begins or ends within a time, the whole time is meant.
  if (first) range.setStartBefore(first);
  if (last) range.setEndAfter(last);
  for (const time of times) time.firstChild.data = time.dateTime;
  event.clipboardData.setData('text/plain', selection.toString());
  event.preventDefault();
  times.forEach((time, at) => { time.firstChild.data = shown[at]; });
  range.setStart(startContainer, startOffset);
  range.setEnd(endContainer, endOffset);
});

// Copy buttons, on code and on what the server marks with `data-copy`.
const copyText = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS browsers offer no clipboard to pages.
    const focused = document.activeElement;
    const area = document.createElement('textarea');
    area.value = text;
    area.className = 'unseen';
    body.append(area);
    area.select();
    const done = document.execCommand('copy');
    area.remove();
    focused?.focus();
    return done;
  }
};

const offerCopy = (source) => {
  let place = source;
  if (source.nodeName === 'PRE') {
    place = source.parentElement;
    if (!place.classList.contains('code')) {
      place = document.createElement('div');
      place.className = 'code';
      source.replaceWith(place);
      place.append(source);
    }
  }
  if (place.querySelector(':scope > .copy')) return;
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'copy';
  button.setAttribute('data-own', '');
  const what = source.dataset.copy ? ` ${source.dataset.copy}` : '';
  button.setAttribute('aria-label', `Copy${what}`);
  button.title = 'Copy';
  button.innerHTML = '<svg class="g" aria-hidden="true"><use href="#g-copy"/></svg>';
  place.append(button);
};

document.addEventListener('click', async (event) => {
  const button = event.target.closest?.('.copy');
  if (!button) return;
  event.preventDefault();
  const source = button.closest('.code')?.querySelector('pre') ?? button.parentElement;
  const done = await copyText(source.dataset.copy || source.textContent.trim());
  button.classList.toggle('done', done);
  say(done ? 'Copied' : 'The browser does not allow this page to copy');
  setTimeout(() => { button.classList.remove('done'); say(''); }, 2000);
});

// Replacing a part. Nodes that stay the same are kept, so that focus, selection and open details stay. A link is known by the page that
// it leads to, because a row before it, or a mark of an axis, may come or go.
const linkKey = (node) => (node.localName === 'a' ? node.getAttribute('href')?.split('?')[0] ?? '' : '');
const keyOf = (node) => (node.nodeType === 1 ? node.id || node.dataset.key || linkKey(node) : '');
const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

const morphAttributes = (from, to) => {
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && !(name === 'open' && from.nodeName === 'DETAILS') && name !== 'tabindex') from.removeAttribute(name);
  }
  for (const { name, value } of to.attributes) {
    if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
};

const morph = (from, to) => {
  if (from.nodeType !== 1) {
    if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
    return;
  }
  if (from.hasAttribute('data-keep')) return;
  const isTime = from.nodeName === 'TIME' && to.dataset.rel === from.dataset.rel;
  morphAttributes(from, to);
  const typing = (from.nodeName === 'INPUT' || from.nodeName === 'SELECT');
  if (isTime || typing) return;
  let at = from.firstChild;
  for (const wanted of [...to.childNodes]) {
    let match = at;
    if (match && !alike(match, wanted) && keyOf(wanted)) {
      while (match && !alike(match, wanted)) match = match.nextSibling;
    }
    if (match && alike(match, wanted)) {
      if (match !== at) from.insertBefore(match, at);
      else at = at.nextSibling;
      morph(match, wanted);
    } else {
      from.insertBefore(wanted, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    if (!(at.nodeType === 1 && at.hasAttribute('data-own'))) at.remove();
    at = next;
  }
};

const say = (text) => { const said = byId('said'); if (said && said.textContent !== text) said.textContent = text; };

// The text of each part that the stream has sent. An update is a whole text, or a patch: lines to keep of the former text, and new lines.
const told = new Map();
const whole = (id, news) => {
  if (typeof news === 'string') return news;
  const lines = told.get(id).split('\n');
  return news.flatMap((step) => (typeof step === 'string' ? step : lines.slice(step[0], step[0] + step[1]))).join('\n');
};

const change = ([id, tag, news]) => {
  const html = whole(id, news);
  told.set(id, html);
  const part = byId(id);
  if (!part) return;
  const template = document.createElement('template');
  template.innerHTML = html;
  const before = part.querySelector('[data-say]')?.dataset.say;
  const wanted = part.cloneNode(false);
  wanted.append(template.content);
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  morph(part, wanted);
  // A node that is moved within the part loses the focus.
  if (focused?.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
  part.dataset.tag = tag;
  countOn(part);
  const after = part.querySelector('[data-say]')?.dataset.say;
  if (after && after !== before) say(after);
  draw(part);
};

// Live updates. The page sends the digests of its parts and receives the parts that differ, however long it was disconnected.
const follow = byId('follow');
const offline = byId('offline');
let stream = null;
let heard = 0;
let wait = 500;
let lostSince = 0;

const show = (kind, text) => {
  if (!follow) return;
  follow.hidden = false;
  follow.className = `follow ${kind}`;
  if (follow.textContent !== text) follow.textContent = text;
};

const lost = () => {
  stream?.close();
  stream = null;
  lostSince ||= Date.now();
  show('lost', 'not live');
  offline.hidden = false;
  offline.textContent = 'Not live: the connection to Muster is lost. Values may be old; reconnecting.';
  setTimeout(connect, wait);
  wait = Math.min(wait * 2, 8000);
};

const hear = (event) => {
  heard = Date.now();
  const news = JSON.parse(event.data);
  ahead = news.now / 1000 - Date.now();
  news.parts.forEach(change);
  body.dataset.changed = String(Date.now());
};

const connect = () => {
  if (stream || document.hidden || !body.dataset.live) return;
  const have = [...document.querySelectorAll('.part[data-tag]')].map((part) => `${part.id}:${part.dataset.tag}`);
  stream = new EventSource(`${body.dataset.live}&have=${encodeURIComponent(have.join(','))}`);
  stream.onopen = () => {
    heard = Date.now();
    wait = 500;
    offline.hidden = true;
    lostSince = 0;
    show('', 'live');
  };
  stream.addEventListener('parts', hear);
  stream.addEventListener('tick', hear);
  stream.onerror = lost;
};

// A hidden page closes its stream: browsers allow few connections to one server.
document.addEventListener('visibilitychange', () => {
  if (!document.hidden) { connect(); return; }
  stream?.close();
  stream = null;
  show('still', 'paused');
});
// A broken connection may raise no error, so silence counts as a loss.
setInterval(() => { if (stream && Date.now() - heard > 25000) lost(); }, 5000);

// The grid of a small job: one stop for the Tab key, arrow keys within.
const roam = (list) => {
  const cells = [...list.querySelectorAll('a')];
  const stop = cells.includes(document.activeElement) ? document.activeElement : cells[0];
  for (const cell of cells) cell.tabIndex = cell === stop ? 0 : -1;
};

const across = (cells) => {
  const top = cells[0]?.offsetTop;
  const next = cells.findIndex((cell) => cell.offsetTop !== top);
  return next < 0 ? cells.length : next;
};

const step = (key, at, columns, count) => {
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at, End: count - 1 - at }[key];
  if (by === undefined) return -1;
  return Math.min(Math.max(at + by, 0), count - 1);
};

document.addEventListener('keydown', (event) => {
  const list = event.target.closest?.('[data-cells]');
  if (!list) return;
  const cells = [...list.querySelectorAll('a')];
  const to = step(event.key, cells.indexOf(event.target), across(cells), cells.length);
  if (to < 0) return;
  event.preventDefault();
  for (const cell of cells) cell.tabIndex = -1;
  cells[to].tabIndex = 0;
  cells[to].focus();
});

// In the pictures whose rows or boxes are links, the arrow keys lead to the next one in their direction.
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const centre = (link) => {
  const box = link.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
};
const nearest = (links, from, [right, down]) => {
  const [x, y] = centre(from);
  let [best, least] = [null, Infinity];
  for (const link of links) {
    const [atX, atY] = centre(link);
    const [dx, dy] = [atX - x, atY - y];
    const [ahead, aside] = right ? [dx * right, Math.abs(dy)] : [dy * down, Math.abs(dx)];
    // What is in the same row or column comes before what is nearer and beside it.
    const cost = ahead + 8 * aside;
    if (link !== from && ahead > 1 && cost < least) [best, least] = [link, cost];
  }
  return best;
};
document.addEventListener('keydown', (event) => {
  const link = event.target.closest?.('svg.states a, svg.waterfall a, svg.heatmap a, .map.hosts svg a');
  if (!link) return;
  const links = [...link.ownerSVGElement.querySelectorAll('a')];
  const to = { Home: links[0], End: links.at(-1) }[event.key] ?? (ARROWS[event.key] && nearest(links, link, ARROWS[event.key]));
  if (!to) return;
  event.preventDefault();
  to.focus();
});

// The results of the search: the arrow keys lead from the field to them, and from one to the next.
document.addEventListener('keydown', (event) => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const stops = [byId('search'), ...document.querySelectorAll('.results a')];
  const at = stops.indexOf(event.target);
  const to = by && at >= 0 && stops[at + by];
  if (!to) return;
  event.preventDefault();
  to.focus();
});

// Escape closes an opened use of a barrier.
document.addEventListener('keydown', (event) => {
  const close = event.key === 'Escape' && !chosen && document.querySelector('[data-close]');
  if (close) location.href = close.href;
});

// The slash key focuses the search, unless the focus is in a field.
document.addEventListener('keydown', (event) => {
  const typing = event.target.closest?.('input, select, textarea, [contenteditable]');
  const search = byId('search');
  if (event.key !== '/' || event.ctrlKey || event.metaKey || event.altKey || typing || !search) return;
  event.preventDefault();
  search.focus();
  search.select();
});

// The picture of a large job: pointing at a cell names its task, Enter or a click opens its page.
const lookOf = (map, x, y) => {
  for (const path of map.querySelectorAll('path[data-look]')) {
    for (const [, left, top, long] of path.getAttribute('d').matchAll(/M(\d+) (\d+)h(\d+)/g)) {
      if (y === Number(top) && x >= Number(left) && x < Number(left) + Number(long)) return path.dataset.look;
    }
  }
  return '';
};

// The task of a cell: the picture may begin with another task than 0.
const taskOf = (map, place) => Number(map.dataset.first) + place;

let asking = 0;
const point = (map, place) => {
  const columns = Number(map.dataset.columns);
  if (place < 0 || place >= Number(map.dataset.tasks)) return;
  map.dataset.at = place;
  const task = taskOf(map, place);
  const [x, y] = [(place % columns) * 10, Math.floor(place / columns) * 10];
  const svg = map.querySelector('svg');
  let cursor = map.querySelector('.cursor');
  if (!cursor) {
    cursor = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    cursor.setAttribute('class', 'cursor');
    cursor.setAttribute('data-own', '');
    cursor.setAttribute('width', 10);
    cursor.setAttribute('height', 10);
    svg.append(cursor);
  }
  cursor.setAttribute('x', x);
  cursor.setAttribute('y', y);
  let tip = map.querySelector('.tip');
  if (!tip) {
    tip = document.createElement('span');
    tip.className = 'tip';
    tip.setAttribute('data-own', '');
    map.append(tip);
  }
  const text = `task ${task}: ${lookOf(map, x, y)}`;
  if (tip.dataset.task === String(task)) return;
  tip.dataset.task = task;
  tip.textContent = text;
  const [cell, frame] = [cursor.getBoundingClientRect(), map.getBoundingClientRect()];
  tip.style.left = `${Math.min(cell.left - frame.left, frame.width - 220)}px`;
  tip.style.top = `${cell.bottom - frame.top + 4}px`;
  // The server says more of a task at which the pointer rests.
  clearTimeout(asking);
  asking = setTimeout(async () => {
    const answer = await fetch(`${map.dataset.map}${task}/tip`).catch(() => null);
    const more = answer?.ok ? await answer.text() : '';
    if (more && tip.dataset.task === String(task)) tip.textContent = `${text}, ${more}`;
  }, 200);
};

const placeAt = (map, event) => {
  const svg = map.querySelector('svg');
  const box = svg.getBoundingClientRect();
  const unit = svg.viewBox.baseVal.width / box.width;
  const { x, y } = svg.viewBox.baseVal;
  const column = Math.floor(((event.clientX - box.left) * unit + x) / 10);
  const row = Math.floor(((event.clientY - box.top) * unit + y) / 10);
  const columns = Number(map.dataset.columns);
  return column < 0 || column >= columns || row < 0 ? -1 : row * columns + column;
};

const unpoint = (map) => {
  clearTimeout(asking);
  map.querySelectorAll('.tip, .cursor').forEach((it) => it.remove());
};
document.addEventListener('pointermove', (event) => {
  const map = event.target.closest?.('[data-map]');
  if (map) point(map, placeAt(map, event));
});
document.addEventListener('pointerout', (event) => {
  const map = event.target.closest?.('[data-map]');
  if (map && map !== document.activeElement && !map.contains(event.relatedTarget)) unpoint(map);
});
// By keyboard, the cell that Enter opens is marked.
document.addEventListener('focusin', (event) => {
  if (event.target.matches('[data-map]:focus-visible')) point(event.target, Number(event.target.dataset.at || 0));
});
document.addEventListener('focusout', (event) => { if (event.target.matches('[data-map]')) unpoint(event.target); });
document.addEventListener('click', (event) => {
  const map = event.target.closest?.('[data-map]');
  const place = map ? placeAt(map, event) : -1;
  if (place >= 0 && place < Number(map.dataset.tasks)) location.href = map.dataset.map + taskOf(map, place);
});
document.addEventListener('keydown', (event) => {
  const map = event.target.closest?.('[data-map]');
  if (!map) return;
  const at = Number(map.dataset.at || 0);
  if (event.key === 'Enter') { location.href = map.dataset.map + taskOf(map, at); return; }
  if (event.key === 'Escape') { unpoint(map); return; }
  const to = step(event.key, at, Number(map.dataset.columns), Number(map.dataset.tasks));
  if (to < 0) return;
  event.preventDefault();
  point(map, to);
  say(map.querySelector('.tip').textContent);
});

// The picture of states over a run: dragging over it opens the page for that part of the time.
let chosen = null;
const timePlace = (svg, event) => {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  return Math.min(Math.max(point.x, 0), 1000);
};

document.addEventListener('pointerdown', (event) => {
  const picture = event.button === 0 && event.pointerType !== 'touch' && event.target.closest?.('[data-time-range]');
  if (!picture || event.target.closest('a')) return;
  const svg = picture.querySelector('svg');
  const rect = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
  rect.setAttribute('class', 'chosen');
  rect.setAttribute('data-own', '');
  rect.setAttribute('height', svg.viewBox.baseVal.height - 36);
  chosen = { picture, svg, rect, from: timePlace(svg, event) };
  event.preventDefault();
});
document.addEventListener('pointermove', (event) => {
  if (!chosen) return;
  const { svg, rect, from } = chosen;
  const to = timePlace(svg, event);
  rect.setAttribute('x', Math.min(from, to));
  rect.setAttribute('width', Math.abs(to - from));
  if (!rect.isConnected) svg.append(rect);
});
document.addEventListener('pointerup', (event) => {
  if (!chosen) return;
  const { picture, svg, rect, from } = chosen;
  const [left, right] = [from, timePlace(svg, event)].sort((a, b) => a - b);
  rect.remove();
  chosen = null;
  if (right - left < 5) return;
  const [begin, end] = [picture.dataset.from, picture.dataset.until].map(Number);
  const at = (place) => Math.round(begin + ((end - begin) * place) / 1000);
  const address = new URL(picture.dataset.timeRange, location.href);
  address.searchParams.set('from', at(left));
  address.searchParams.set('until', at(right));
  location.href = address;
});
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || !chosen) return;
  chosen.rect.remove();
  chosen = null;
});

// Makes the grids and the copy buttons of a part work. `charts.js`, on pages with charts, draws them.
const draw = (within) => {
  within.querySelectorAll('[data-cells]').forEach(roam);
  within.querySelectorAll('[data-map]').forEach((map) => {
    map.tabIndex = 0;
    map.setAttribute('role', 'group');
    map.setAttribute('aria-label', 'Tasks: arrow keys go from one to the next, Enter opens it');
  });
  within.querySelectorAll('pre, [data-copy]').forEach(offerCopy);
  document.dispatchEvent(new CustomEvent('muster-draw', { detail: within }));
};

// For `charts.js`.
window.muster = { inZone, zoneName, absolute, isLocal, say: (text) => say(text) };

countOn(document);
draw(document);
addEventListener('load', () => draw(document));
connect();
