// Draws charts from the tables that hold the same values: lines over time, the heartbeat gaps of a task, and their lengths.
// A chart shows the values under the pointer, zooms by dragging and by buttons, and hides a series when its key is pressed. All of that works
// by keyboard: arrow keys read the values, plus and minus zoom, Escape shows all.

const style = () => getComputedStyle(document.body);
const colour = (name) => style().getPropertyValue(name).trim();
const axisOf = () => ({ stroke: colour('--dim'), grid: { stroke: colour('--line'), width: 1 }, ticks: { stroke: colour('--line') }, font: `12px ${style().fontFamily}` });
const zoned = (seconds) => (window.muster.isLocal() ? new Date(seconds * 1000) : window.uPlot.tzDate(new Date(seconds * 1000), 'Etc/UTC'));

// The texts of the marks at these times: the time of day, and below it the date where the day changes. If the axis is longer than a day, its
// first mark has a date, too.
const timeMarks = (chart, times, axis, space, step) => {
  const marks = times.map((at) => window.muster.inZone(at * 1000));
  const isLong = chart.scales.x.max - chart.scales.x.min > 86400;
  return marks.map(({ date, time }, at) => {
    const isDated = at === 0 ? isLong : marks[at - 1].date !== date;
    return `${time.slice(0, step < 60 ? 8 : 5)}${isDated ? `\n${date}` : ''}`;
  });
};
// The axis of time, which names its zone.
const timeAxis = (axis) => ({
  ...axis, space: 76, grid: { show: false }, label: `time (${window.muster.zoneName()})`, labelSize: 18, labelGap: 0, labelFont: axis.font,
  values: timeMarks, size: (_, texts) => ((texts ?? []).some((text) => text.includes('\n')) ? 46 : 32),
});
// A single point needs a range of its own: by default the chart would show a day.
// The end of the data, because uPlot passes a later one if there is a single value.
const timeScale = {
  time: true,
  range: (plot, low, high) => {
    if (low === null) return [0, 1];
    const end = plot.data[0].length === 1 ? low : high;
    return [Math.min(low, end - 10), end];
  },
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

// Strokes by the class of a column; the picture that came with the page has the same.
const strokes = {
  't-shm': ['--ok'], 't-pvm': ['--info', [7, 3]], 't-gpu': ['--text', [12, 3]], 't-unix': ['--warn-cell', [2, 2]], 't-tcp': ['--link', [10, 3, 2, 3]],
  't-local': ['--ok', [2, 4]], 't-other': ['--dim', [1, 4]], 'l-0': ['--link'], 'l-1': ['--ok', [10, 3]], 'l-2': ['--warn-cell', [4, 3]],
  'l-3': ['--info', [10, 3, 2, 3]], 'l-4': ['--text', [2, 3]],
};

// A kind of chart reads a table and returns: the data; the names of its series; the text of a place on the x axis and of a value; whether x is
// time; and the options of uPlot.

// Lines over time, one for each column of the table.
const lines = (table) => {
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells].slice(1);
  const axis = axisOf();
  return {
    data: [rows.map((row) => Number(row.dataset.at) / 1e6), ...heads.map((_, column) => rows.map((row) => Number(row.cells[column + 1].dataset.value)))],
    names: heads.map((cell) => cell.textContent), isTime: true, title: table.caption.textContent.split(',')[0],
    when: (at) => window.muster.absolute(at * 1000), value: rate, height: 206,
    options: {
      padding: [null, 36, null, null],
      scales: { x: timeScale, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.05] } },
      axes: [timeAxis(axis), { ...axis, size: 92, incrs: Array.from({ length: 50 }, (_, at) => 2 ** at), values: (_, ticks) => ticks.map(rate) }],
      series: [{}, ...heads.map((cell) => {
        const [name, dash] = strokes[cell.dataset.style] ?? strokes['t-other'];
        return { stroke: colour(name), width: 2, dash, points: { show: rows.length === 1 } };
      })],
    },
  };
};

const short = (seconds) => (seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(2)} s`);

// The number of gaps in each class.
const counts = (table) => {
  const rows = [...table.tBodies[0].rows];
  const names = rows.map((row) => row.cells[0].textContent);
  const axis = axisOf();
  return {
    data: [names.map((_, at) => at), rows.map((row) => Number(row.cells[1].textContent))],
    names: ['heartbeats'], isTime: false, title: table.caption.textContent.split(',')[0], when: (at) => names[at] ?? '', value: String, height: 150,
    options: {
      scales: { x: { time: false, range: [-0.6, names.length - 0.4] }, y: { range: (_, low, high) => [0, Math.max(high, 1)] } },
      axes: [
        { ...axis, grid: { show: false }, splits: () => names.map((_, at) => at), values: () => names.map((name, at) => (names.length > 9 && at % 2 ? '' : name)) },
        { ...axis, size: 52, label: 'heartbeats', labelSize: 18, labelFont: axis.font, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] },
      ],
      series: [{}, { fill: colour('--info'), stroke: colour('--info'), width: 0, points: { show: false }, paths: window.uPlot.paths.bars({ size: [0.7, 80] }) }],
    },
  };
};

// Gaps over time, with the timeout and the median of the job.
const course = (table) => {
  const gaps = [...table.tBodies[0].rows].map((row) => [Number(row.dataset.at) / 1e6, Number(row.dataset.gap) / 1e6]).sort((a, b) => a[0] - b[0]);
  const axis = axisOf();
  const marks = () => [
    ['timeout', Number(table.dataset.timeout) / 1e6, colour('--bad'), []],
    ['usual in the job', Number(table.dataset.median) / 1e6, colour('--ok'), [5, 4]],
  ];
  const across = ({ ctx, bbox, valToPos }) => {
    ctx.save();
    ctx.font = axis.font.replace('12px', `${12 * devicePixelRatio}px`);
    ctx.textAlign = 'left';
    ctx.textBaseline = 'bottom';
    for (const [name, at, stroke, dash] of marks()) {
      const y = valToPos(at, 'y', true);
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
    data: [gaps.map(([at]) => at), gaps.map(([, gap]) => gap)],
    names: ['gap'], isTime: true, title: table.caption.textContent.split(',')[0], when: (at) => window.muster.absolute(at * 1000), value: short, height: 226,
    options: {
      scales: { x: timeScale, y: { range: (_, low, high) => [0, Math.max(high ?? 0, marks()[0][1]) * 1.15] } },
      axes: [timeAxis(axis), { ...axis, size: 52, label: 'gap, seconds', labelSize: 18, labelFont: axis.font }],
      series: [{}, { stroke: colour('--info'), width: 1.5, points: { show: true, size: 5, fill: colour('--info') } }],
      hooks: { draw: [across] },
    },
  };
};

const element = (name, className, text = '') => {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
};

// The ranges to choose from, in seconds: those that are shorter than the data.
const RANGES = [[60, '1 min'], [600, '10 min'], [3600, '1 h'], [21600, '6 h'], [86400, '1 d']];

// A chart in its place. `range` is what it shows: `null` for all, a number of seconds up to the newest value, or the two ends that were chosen
// by dragging.
class Chart {
  constructor(place) {
    this.place = place;
    this.hidden = new Set();
    this.range = null;
    this.bar = element('div', 'ranges');
    this.readout = element('span', 'readout');
    this.room = element('div', 'room');
    place.textContent = '';
    place.append(this.bar, this.room);
    place.tabIndex = 0;
    place.setAttribute('role', 'group');
    place.addEventListener('keydown', (event) => this.key(event));
    this.bar.addEventListener('click', ({ target }) => {
      if (!target.dataset.range) return;
      this.range = Number(target.dataset.range) || null;
      this.apply();
    });
  }

  // Draws new values. The chart is made again only if more than the values has changed, so that hovering and dragging go on.
  update(kind, table) {
    const { data, names, isTime, title, when, value, options, height } = kind(table);
    Object.assign(this, { data, names, when, value, isTime });
    const width = Math.max(this.place.parentElement.clientWidth - 2, 240);
    const shape = JSON.stringify([names, width, window.muster.zoneName(), colour('--text'), isTime || data[0].length]);
    if (shape === this.shape) {
      this.chart.setData(data, this.range === null);
    } else {
      this.shape = shape;
      this.chart?.destroy();
      this.place.setAttribute('aria-label', `${title}: arrow keys read the values${isTime ? ', plus and minus zoom, Escape shows all' : ''}`);
      const hooks = { ...options.hooks, setCursor: [() => this.read()], setSelect: [({ select }) => this.choose(select)] };
      const series = options.series.map((one, at) => (at && this.hidden.has(names[at - 1]) ? { ...one, show: false } : one));
      this.chart = new window.uPlot({
        width, height, legend: { show: false }, tzDate: zoned, ...options, series, hooks,
        cursor: { y: false, points: { size: 7 }, drag: { x: isTime, y: false, setScale: false }, bind: { dblclick: () => () => this.all() } },
      }, data, this.room);
    }
    this.buttons();
    this.keys();
    if (this.range !== null) this.apply();
    this.read();
  }

  // The buttons of the ranges that the data allow.
  buttons() {
    const length = this.data[0].at(-1) - this.data[0][0];
    const offered = this.isTime ? RANGES.filter(([seconds]) => seconds < length) : [];
    const wanted = offered.length ? [...offered, [0, 'all']] : [];
    const have = [...this.bar.querySelectorAll('button')];
    if (have.map((button) => button.textContent).join() !== wanted.map(([, name]) => name).join()) {
      this.bar.textContent = '';
      for (const [seconds, name] of wanted) {
        const button = element('button', '', name);
        button.type = 'button';
        button.dataset.range = seconds;
        this.bar.append(button);
      }
      this.bar.append(this.readout);
    }
    for (const button of this.bar.querySelectorAll('button')) {
      button.setAttribute('aria-pressed', Array.isArray(this.range) ? false : Number(button.dataset.range) === (this.range ?? 0));
    }
  }

  // The keys of the series above the chart: each shows or hides its series.
  keys() {
    for (const key of this.place.closest('section')?.querySelectorAll('.key[data-series]') ?? []) {
      key.tabIndex = 0;
      key.setAttribute('role', 'button');
      key.setAttribute('aria-pressed', !this.hidden.has(this.names[Number(key.dataset.series)]));
    }
  }

  toggle(at) {
    const name = this.names[at];
    const shown = this.hidden.delete(name);
    if (!shown) this.hidden.add(name);
    this.chart.setSeries(at + 1, { show: shown });
    this.keys();
  }

  all() {
    if (!this.isTime) return;
    this.range = null;
    this.apply();
  }

  choose({ left, width }) {
    if (width < 4) return;
    const [from, until] = [left, left + width].map((x) => this.chart.posToVal(x, 'x'));
    this.chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (until - from >= 1) this.range = [from, until];
    this.apply();
  }

  apply() {
    const [first, last] = [this.data[0][0], this.data[0].at(-1)];
    const [min, max] = Array.isArray(this.range) ? this.range : [this.range === null ? first : last - this.range, last];
    this.chart.setScale('x', { min, max });
    this.buttons();
  }

  // Shows the values under the cursor.
  read() {
    const at = this.chart?.cursor.idx ?? null;
    const values = at === null ? [] : this.names.map((name, one) => (this.hidden.has(name) ? '' : `${name} ${this.value(this.data[one + 1][at] ?? 0)}`));
    const text = at === null || this.data[0][at] === undefined ? '' : `${this.when(this.data[0][at])}: ${values.filter(Boolean).join(', ')}`;
    if (this.readout.textContent !== text) this.readout.textContent = text;
    if (!this.readout.isConnected) this.bar.append(this.readout);
  }

  key(event) {
    if (event.target !== this.place) return;
    const last = this.data[0].length - 1;
    const at = this.chart.cursor.idx ?? last + 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    const zoom = this.isTime ? { '+': 0.5, '-': 2 }[event.key] : undefined;
    if (to === undefined && !zoom && event.key !== 'Escape') return;
    event.preventDefault();
    if (event.key === 'Escape') this.all();
    if (zoom) {
      const { min, max } = this.chart.scales.x;
      const middle = this.data[0][Math.min(at, last)];
      const half = (Math.max((max - min) * zoom, 10)) / 2;
      this.range = (half * 2 >= this.data[0][last] - this.data[0][0]) ? null : [middle - half, middle + half];
      this.apply();
    }
    if (to === undefined) return;
    const here = Math.min(Math.max(to, 0), last);
    const x = this.data[0][here];
    const { min, max } = this.chart.scales.x;
    // A value beside what is shown moves into view.
    if (Array.isArray(this.range) && (x < min || x > max)) {
      const shift = x < min ? x - min : x - max;
      this.range = [min + shift, max + shift];
      this.apply();
    }
    this.chart.setCursor({ left: this.chart.valToPos(x, 'x'), top: 10 });
    window.muster.say(this.readout.textContent);
  }
}

const charts = new WeakMap();
const drawIn = (place, table, kind) => {
  if (!table || typeof window.uPlot !== 'function' || !table.tBodies[0].rows.length) return;
  const drawn = JSON.stringify([table.textContent, { ...table.dataset }, [...table.querySelectorAll('[data-value]')].map((cell) => cell.dataset.value), place.parentElement.clientWidth, window.muster.zoneName()]);
  if (place.drawn === drawn) return;
  place.drawn = drawn;
  if (!charts.has(place)) charts.set(place, new Chart(place));
  charts.get(place).update(kind, table);
};

document.addEventListener('muster-draw', ({ detail: within }) => {
  for (const place of within.querySelectorAll('[data-plot]')) {
    const table = document.getElementById(place.dataset.plot);
    drawIn(place, table, table?.dataset.timeout ? course : counts);
  }
  for (const place of within.querySelectorAll('[data-lines]')) {
    drawIn(place, document.getElementById(place.dataset.lines), lines);
    // The chart replaces the picture that came with the page.
    if (charts.has(place)) document.documentElement.classList.add('drawn');
  }
});

const press = (event) => {
  const key = event.target.closest?.('.key[data-series]');
  const place = key?.closest('section')?.querySelector('[data-lines]');
  if (!place || !charts.has(place)) return;
  event.preventDefault();
  charts.get(place).toggle(Number(key.dataset.series));
};
document.addEventListener('click', press);
document.addEventListener('keydown', (event) => { if (event.key === 'Enter' || event.key === ' ') press(event); });
let resized;
addEventListener('resize', () => { clearTimeout(resized); resized = setTimeout(() => document.dispatchEvent(new CustomEvent('muster-draw', { detail: document })), 150); });
