// Enhances pages that are complete without it: it updates relative times, applies live updates, and moves the focus by arrow keys.
// Without this file every page, filter and form works the same.
//
// It morphs the DOM by itself rather than by idiomorph (0.8.0, 10 KiB). On the parts that change on a page of 10,000 tasks when 100 are
// lost, idiomorph took 5, 16 and 11 % longer in three runs (medians of 60 replacements of each part, Chromium). It also matches nodes by
// `id` alone: a row that comes in above others took over the open details of the row below it. Rows are matched here by `data-key`.

const body = document.body;
const byId = (id) => document.getElementById(id);

// Times. The server writes absolute times; the relative ones are updated here by the clock of the server.
let ahead = Number(body.dataset.now) / 1000 - Date.now();
const serverNow = () => (Date.now() + ahead) / 1000;

const span = (seconds) => {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
};

const words = (relation) => {
  const [form, at] = relation.split(':');
  const since = serverNow() - Number(at) / 1e6;
  if (form === 'ago') return since < 1 ? 'just now' : `${span(since)} ago`;
  if (form === 'in') return since >= 0 ? 'now' : `in ${span(-since)}`;
  return span(since);
};

const countOn = (within) => {
  for (const time of within.querySelectorAll('time[data-rel]')) {
    const text = words(time.dataset.rel);
    if (time.textContent !== text) time.textContent = text;
  }
};

setInterval(() => document.hidden || countOn(document), 1000);

// Replacing a part. Nodes that stay the same are kept, so that focus, selection and open details stay.
const keyOf = (node) => (node.nodeType === 1 ? node.id || node.dataset.key || '' : '');
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
  morph(part, wanted);
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

let asking = 0;
const point = (map, task) => {
  const columns = Number(map.dataset.columns);
  if (task < 0 || task >= Number(map.dataset.tasks)) return;
  map.dataset.at = task;
  const [x, y] = [(task % columns) * 10, Math.floor(task / columns) * 10];
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
    if (answer?.ok && tip.dataset.task === String(task)) tip.textContent = await answer.text();
  }, 200);
};

const taskAt = (map, event) => {
  const svg = map.querySelector('svg');
  const box = svg.getBoundingClientRect();
  const unit = svg.viewBox.baseVal.width / box.width;
  const { x, y } = svg.viewBox.baseVal;
  const column = Math.floor(((event.clientX - box.left) * unit + x) / 10);
  const row = Math.floor(((event.clientY - box.top) * unit + y) / 10);
  const columns = Number(map.dataset.columns);
  return column < 0 || column >= columns || row < 0 ? -1 : row * columns + column;
};

document.addEventListener('pointermove', (event) => {
  const map = event.target.closest?.('[data-map]');
  if (map) point(map, taskAt(map, event));
});
document.addEventListener('click', (event) => {
  const map = event.target.closest?.('[data-map]');
  const task = map ? taskAt(map, event) : -1;
  if (task >= 0 && task < Number(map.dataset.tasks)) location.href = map.dataset.map + task;
});
document.addEventListener('keydown', (event) => {
  const map = event.target.closest?.('[data-map]');
  if (!map) return;
  const at = Number(map.dataset.at || 0);
  if (event.key === 'Enter') { location.href = map.dataset.map + at; return; }
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
  const picture = event.button === 0 && event.pointerType !== 'touch' && event.target.closest?.('[data-range]');
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
  const address = new URL(picture.dataset.range, location.href);
  address.searchParams.set('from', at(left));
  address.searchParams.set('until', at(right));
  location.href = address;
});
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || !chosen) return;
  chosen.rect.remove();
  chosen = null;
});

// Draws charts from the tables that hold the same values.
const draw = (within) => {
  within.querySelectorAll('[data-cells]').forEach(roam);
  within.querySelectorAll('[data-map]').forEach((map) => {
    map.tabIndex = 0;
    map.setAttribute('role', 'group');
    map.setAttribute('aria-label', 'Tasks: arrow keys go from one to the next, Enter opens it');
  });
  within.querySelectorAll('[data-plot]').forEach(plot);
  within.querySelectorAll('[data-lines]').forEach(lines);
};

const plot = (place) => {
  const table = byId(place.dataset.plot);
  if (!table || typeof window.uPlot !== 'function') return;
  const rows = [...table.tBodies[0].rows];
  const drawn = JSON.stringify([table.textContent, { ...table.dataset }, place.clientWidth]);
  if (place.drawn === drawn || !rows.length) return;
  place.drawn = drawn;
  const style = getComputedStyle(body);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour('--dim'), grid: { stroke: colour('--line'), width: 1 }, ticks: { stroke: colour('--line') }, font: `12px ${style.fontFamily}` };
  const width = Math.max(place.parentElement.clientWidth - 2, 240);
  const { scales, axes, series, hooks, data } = (table.dataset.timeout ? course : counts)(rows, table, axis, colour);
  place.textContent = '';
  new window.uPlot({ width, height: place.classList.contains('low') ? 150 : 210, legend: { show: false }, cursor: { show: false }, scales, axes, series, hooks, tzDate: (at) => window.uPlot.tzDate(new Date(at * 1000), 'Etc/UTC') }, data, place);
  place.setAttribute('aria-hidden', 'true');
};

// The number of gaps in each class.
const counts = (rows, _table, axis, colour) => {
  const names = rows.map((row) => row.cells[0].textContent);
  return {
    scales: { x: { time: false, range: [-0.6, names.length - 0.4] }, y: { range: (_, low, high) => [0, Math.max(high, 1)] } },
    axes: [
      { ...axis, grid: { show: false }, splits: () => names.map((_, at) => at), values: () => names.map((name, at) => (names.length > 9 && at % 2 ? '' : name)) },
      { ...axis, size: 52, label: 'heartbeats', labelSize: 18, labelFont: axis.font, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] },
    ],
    series: [{}, { fill: colour('--info'), stroke: colour('--info'), width: 0, points: { show: false }, paths: window.uPlot.paths.bars({ size: [0.7, 80] }) }],
    data: [names.map((_, at) => at), rows.map((row) => Number(row.cells[1].textContent))],
  };
};

// Gaps over time, with the timeout and the median of the job.
const course = (rows, table, axis, colour) => {
  const gaps = rows.map((row) => [Number(row.dataset.at) / 1e6, Number(row.dataset.gap) / 1e6]).sort((a, b) => a[0] - b[0]);
  const lines = [
    ['timeout', Number(table.dataset.timeout) / 1e6, colour('--bad'), []],
    ['usual in the job', Number(table.dataset.median) / 1e6, colour('--ok'), [5, 4]],
  ];
  const [first, last] = [gaps[0][0], gaps.at(-1)[0]];
  const most = Math.max(...gaps.map(([, gap]) => gap), lines[0][1]);
  const across = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.font = axis.font.replace('12px', `${12 * devicePixelRatio}px`);
    ctx.textAlign = 'left';
    ctx.textBaseline = 'bottom';
    for (const [name, at, stroke, dash] of lines) {
      const y = plot.valToPos(at, 'y', true);
      ctx.strokeStyle = ctx.fillStyle = stroke;
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.setLineDash(dash.map((long) => long * devicePixelRatio));
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillText(name, bbox.left + 6 * devicePixelRatio, y - 2 * devicePixelRatio);
    }
    ctx.restore();
  };
  return {
    // A single point needs a range of its own: by default the chart would show a day.
    scales: { x: { time: true, range: () => [Math.min(first, last - 10), last] }, y: { range: [0, most * 1.15] } },
    axes: [
      { ...axis, space: 76, grid: { show: false }, values: [[3600, '{HH}:{mm}', null, null, null, null, null, null, 1], [60, '{HH}:{mm}', null, null, null, null, null, null, 1], [1, '{HH}:{mm}:{ss}', null, null, null, null, null, null, 1]] },
      { ...axis, size: 52, label: 'gap, seconds', labelSize: 18, labelFont: axis.font },
    ],
    series: [{}, { stroke: colour('--info'), width: 1.5, points: { show: true, size: 5, fill: colour('--info') } }],
    hooks: { draw: [across] },
    data: [gaps.map(([at]) => at), gaps.map(([, gap]) => gap)],
  };
};

// Lines over time, one for each column of the table. They replace the picture that came with the page.
// Strokes by the class of a column; the picture has the same.
const strokes = {
  't-shm': ['--ok'], 't-pvm': ['--info', [7, 3]], 't-unix': ['--warn-cell', [2, 2]], 't-tcp': ['--link', [10, 3, 2, 3]],
  't-other': ['--dim', [1, 4]], 'l-0': ['--link'], 'l-1': ['--ok', [10, 3]], 'l-2': ['--warn-cell', [4, 3]],
  'l-3': ['--info', [10, 3, 2, 3]], 'l-4': ['--text', [2, 3]],
};
// Bytes a second, by the rule of the server (`format_bytes` in src/text/numbers.rs).
const rate = (bytes) => {
  const count = Math.round(bytes);
  if (count < 1024) return `${count} B/s`;
  let [scaled, unit] = [count / 1024, 0];
  for (; scaled >= 1023.95 && unit < 4; unit += 1) scaled /= 1024;
  // Half of a tenth becomes the even tenth, as in Rust; `toFixed` would round it up.
  let tenths = Math.round(scaled * 10);
  if (tenths - scaled * 10 === 0.5 && tenths % 2) tenths -= 1;
  return `${(tenths / 10).toFixed(1)} ${['KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit]}/s`;
};

const lines = (place) => {
  const table = byId(place.dataset.lines);
  if (!table || typeof window.uPlot !== 'function') return;
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells].slice(1);
  const names = heads.map((cell) => cell.textContent);
  const when = rows.map((row) => row.cells[0].textContent);
  const rates = names.map((_, column) => rows.map((row) => Number(row.cells[column + 1].dataset.value)));
  const drawn = JSON.stringify([names, when, rates, place.parentElement.clientWidth]);
  if (place.drawn === drawn || !rows.length) return;
  place.drawn = drawn;
  document.documentElement.classList.add('drawn');
  const style = getComputedStyle(body);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour('--dim'), grid: { stroke: colour('--line'), width: 1 }, ticks: { stroke: colour('--line') }, font: `12px ${style.fontFamily}` };
  place.textContent = '';
  new window.uPlot({
    width: Math.max(place.parentElement.clientWidth - 2, 240), height: 190, padding: [null, 36, null, null], legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.05] } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((at) => when[at] ?? '') },
      { ...axis, size: 92, incrs: Array.from({ length: 50 }, (_, at) => 2 ** at), values: (_, ticks) => ticks.map(rate) },
    ],
    series: [{}, ...heads.map((cell) => {
      const [name, dash] = strokes[cell.dataset.style] ?? strokes['t-other'];
      return { stroke: colour(name), width: 2, dash, points: { show: false } };
    })],
  }, [when.map((_, at) => at), ...rates], place);
  place.setAttribute('aria-hidden', 'true');
};

countOn(document);
draw(document);
addEventListener('load', () => draw(document));
connect();
