// The pictures by keyboard alone: the Tab key reaches each row and each box that is a link, which shows the focus, has a name, and opens by Enter.
import { accessible, ask, finish, launchBrowser, open, url, wrong } from './harness.mjs';

const browser = await launchBrowser();
const page = await open(browser);
// The links of a picture, with the style of each: it must change with the focus.
const links = (picture) => page.evaluate((picture) => [...document.querySelectorAll(`${picture} a`)].map((link) => {
  const [own, box] = [getComputedStyle(link), getComputedStyle(link.querySelector('rect'))];
  const [{ top, bottom, left, right }, style] = [link.getBoundingClientRect(), [own.outlineStyle, box.stroke, box.strokeWidth].join(' ')];
  return {
    href: new URL(link.getAttribute('href'), location.href).href,
    name: link.getAttribute('aria-label') ?? '',
    style,
    hasFocus: link === document.activeElement,
    isInView: bottom > 0 && top < innerHeight && right > 0 && left < innerWidth,
  };
}), picture);
const tab = async (picture) => {
  await page.keyboard.press('Tab');
  return (await links(picture)).findIndex(({ hasFocus }) => hasFocus);
};
// Returns the links as they were before one of them had the focus.
const tabToFirst = async (path, picture) => {
  await page.goto(url + path, { waitUntil: 'load' });
  const before = await links(picture);
  for (let at = 0; at < 120; at += 1) if ((await tab(picture)) === 0) return before;
  throw new Error(`the Tab key does not lead to the picture of ${path}`);
};
const opens = async (link) => {
  await page.keyboard.press('Enter');
  await page.waitForURL((shown) => shown.href === link.href, { timeout: 20000 }).catch(() => wrong(`Enter on "${link.name}" leads to ${page.url()}`));
};

for (const [path, picture, least] of [
  ['/jobs/train/timeline', 'svg.states', 20],
  ['/jobs/train/timeline?by=task', 'svg.states', 40],
  ['/jobs/train/barriers', 'svg.waterfall', 6],
  ['/jobs/train/hosts', '.map.hosts svg', 20],
  ['/jobs/train/transfers', 'svg.heatmap', 20],
]) {
  const before = await tabToFirst(path, picture);
  const count = before.length;
  if (count < least) wrong(`the picture of ${path} has ${count} links`);
  for (let at = 0; at < count; at += 1) {
    if (at > 0) {
      const reached = await tab(picture);
      if (reached !== at) wrong(`${path}: after link ${at - 1} the Tab key leads to ${reached}`);
    }
    const link = (await links(picture))[at];
    if (!/\w/.test(link.name)) wrong(`${path}: ${link.href} has no name`);
    if (link.style === before[at].style) wrong(`${path}: the focus on "${link.name}" does not show: ${link.style}`);
    if (!link.isInView) wrong(`${path}: the focused "${link.name}" is out of view`);
  }
  if ((await tab(picture)) >= 0) wrong(`${path}: the Tab key does not leave the picture`);
  await page.keyboard.press('Shift+Tab');
  await opens((await links(picture))[count - 1]);
  await tabToFirst(path, picture);
  await opens((await links(picture))[0]);
  console.log(`${path}: ${count} links`);
}

// The cells of the heat map are in the table below it, whose summary is reached and opened by keyboard as well.
await page.goto(`${url}/jobs/train/transfers`, { waitUntil: 'load' });
const isAtSummary = () => page.evaluate(() => document.activeElement.matches('#pairs summary'));
for (let at = 0; at < 200 && !(await isAtSummary()); at += 1) await page.keyboard.press('Tab');
await page.keyboard.press('Enter');
await page.waitForSelector('#pairs details[open] table a');
await page.keyboard.press('Tab');
await page.keyboard.press('Tab');
const cell = await page.evaluate(() => document.activeElement.href ?? '');
if (!/\/(tasks|hosts)\//.test(cell)) wrong(`behind the summary the Tab key leads to "${cell}"`);
await accessible(page);

// A row keeps the focus when another row, or it, comes first, because of trouble that a live update brings.
await page.goto(`${url}/jobs/train/timeline?by=task`, { waitUntil: 'load' });
for (const [task, lost] of [['30', '7'], ['8', '8']]) {
  await page.waitForSelector('.follow:not(.lost):has-text("live")');
  await page.focus(`svg.states a[href$="/tasks/${task}"]`);
  await ask(`lose ${lost}`);
  await page.waitForFunction((lost) => [...document.querySelectorAll('svg.states a')].slice(0, 3).some((link) => link.getAttribute('href').endsWith(`/tasks/${lost}`)), lost);
  const reached = await page.evaluate(() => document.activeElement.getAttribute('href') ?? document.activeElement.nodeName);
  if (!reached.endsWith(`/tasks/${task}`)) wrong(`after the row of task ${lost} has come first, the focus is not on task ${task} any more but on ${reached}`);
}
await finish(browser);
