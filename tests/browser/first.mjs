// The failure of a run is the first issue, and findings that no longer hold disappear at once.
import { ask, finish, launchBrowser, open, url, wrong } from './harness.mjs';

const browser = await launchBrowser();
const page = await open(browser);
await page.goto(`${url}/jobs/stop`);
await page.waitForSelector('.follow:not(.lost):has-text("live")');
const issues = async (of) => (await of.locator('.need h3').allInnerTexts()).map((title) => title.replace(/\s+/g, ' '));
// Two tasks wait for a connected one until that is a finding.
await page.waitForSelector('.need h3:has-text("1 task has not reached the barrier")', { timeout: 90000 });
// The page of the task shows for how long it has been awaited, which is shorter than the time since it connected.
const task = await open(browser);
await task.goto(`${url}/jobs/stop/tasks/2`);
const standing = await task.locator('.standing .big').innerText();
const since = Number(await task.locator('.standing .big time').getAttribute('data-rel').then((rel) => rel.split(':')[1]));
const last = Number(await page.locator('#waits time[data-rel^=ago]').first().getAttribute('data-rel').then((rel) => rel.split(':')[1]));
if (!/awaited/i.test(standing) || since !== last) wrong(`the task stands as ${standing}, since ${since}; the last of the others came at ${last}`);

await ask('kill');
await page.waitForSelector('.need h3:has-text("Run 1 failed")', { timeout: 20000 });
// On the live page and on a new one, for longer than the finding stays open.
for (let second = 0; second < 12; second += 1) {
  const fresh = await open(browser);
  await fresh.goto(`${url}/jobs/stop`);
  for (const one of [page, fresh]) {
    const titles = await issues(one);
    if (!titles[0]?.startsWith('Run 1 failed')) wrong(`after ${second} s the first issue is ${titles[0]}`);
    if (titles.some((title) => title.includes('reached the barrier'))) wrong(`after ${second} s the page says ${titles.join('; ')}`);
  }
  const text = await fresh.locator('.need.bad .text').first().innerText();
  if (!text.includes('connection closed; no reconnect within 500 ms')) wrong(`the failure is told as ${text}`);
  await fresh.goto(`${url}/`);
  const titles = await issues(fresh);
  if (!titles[0]?.includes('Run 1 failed')) wrong(`after ${second} s the first issue of all jobs is ${titles[0]}`);
  await fresh.context().close();
  await page.waitForTimeout(1000);
}
const found = await (await fetch(`${url}/api/v1/jobs/stop/findings`)).json();
if (found.open.length) wrong(`the REST API still has ${JSON.stringify(found.open)}`);
await finish(browser);
