// The delay of a change: from its cause, by the wall clock, until the document shows it.
import { ask, finish, launchBrowser, open, url, wrong } from './harness.mjs';

const rounds = Number(process.env.MUSTER_ROUNDS ?? 40);
const browser = await launchBrowser();
const page = await open(browser);

// Returns the time at which the document begins or ceases to have an element with this selector and text.
const seen = (selector, wanted = true, text = '') => page.evaluate(([selector, wanted, text]) => new Promise((resolve, reject) => {
  const holds = () => [...document.querySelectorAll(selector)].some((one) => one.textContent.includes(text)) === wanted;
  const watch = new MutationObserver(() => { if (holds()) { watch.disconnect(); resolve(Date.now()); } });
  watch.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
  if (holds()) resolve(Date.now());
  setTimeout(() => reject(new Error(`${selector} ${text}: not ${wanted} within a minute`)), 60000);
}), [selector, wanted, text]);
const follow = async (path) => {
  await page.goto(url + path);
  await page.waitForSelector('.follow:not(.lost):has-text("live")');
};
// Changes must not be in step with the snapshots of the server.
const pause = (least) => page.waitForTimeout(least + Math.random() * 900);
const tell = (what, figures, most = 500) => {
  figures.sort((a, b) => a - b);
  const at = (part) => figures[Math.min(figures.length - 1, Math.floor(figures.length * part))];
  console.log(`| ${what} | ${figures.length} | ${at(0)} ms | ${at(0.5)} ms | ${at(0.95)} ms | ${figures.at(-1)} ms |`);
  if (at(0.95) > most) wrong(`${what} is seen after ${at(0.95)} ms`);
};
const call = async (method, path, body) => {
  const answer = await fetch(`${url}/api/v1/jobs/train/exclusions${path}`, { method, headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
  return answer.json();
};

console.log('| change | times | least | median | 95 of 100 | most |');
console.log('| --- | --- | --- | --- | --- | --- |');
{
  await follow('/jobs/train');
  const [excluded, lifted, came] = [[], [], []];
  for (let round = 0; round < rounds; round += 1) {
    await pause(300);
    let at = Date.now();
    const shown = seen('.cell.excluded');
    const { id } = await call('POST', '', { task: 6, reason: 'to see it' });
    excluded.push(await shown - at);
    await pause(300);
    at = Date.now();
    const gone = seen('.cell.excluded', false);
    await call('DELETE', `/${id}?reason=seen`);
    lifted.push(await gone - at);
    await pause(300);
    const back = seen('.cell.missing, .cell.failed', false);
    at = await ask('restart');
    came.push(await back - at);
  }
  tell('a task is excluded', excluded);
  tell('its exclusion is lifted', lifted);
  tell('it registers again', came);
}
{
  const [dead, failed] = [[], []];
  for (let round = 0; round < rounds; round += 1) {
    await pause(300);
    const suspect = seen('.cell.suspect, .cell.failed');
    const late = seen('.cell.failed');
    const at = await ask('kill');
    dead.push(await suspect - at);
    failed.push(await late - at);
    const back = seen('.cell.failed, .cell.suspect, .cell.missing', false);
    await ask('start');
    await back;
  }
  tell('a process is killed (kill -9): suspect', dead);
  tell('a process is killed: failed, after the grace of 500 ms', failed, 1000);
}
{
  // The other tasks meet without the one that takes no part.
  await call('POST', '', { task: 7, reason: 'it does not meet' });
  await follow('/jobs/train/barriers');
  const passed = [];
  for (let round = 0; round < rounds * 2; round += 1) {
    await pause(100);
    const shown = seen(`#recent tbody tr:first-child[data-key="train/step ${round}"]`);
    passed.push([await ask('meet'), await shown]);
  }
  tell('a barrier passes', passed.map(([at, shown]) => shown - at));
}
await finish(browser);
