// The demo: pages that were loaded once show the actions of its workers as they happen.
import { accessible, finish, launchBrowser, open, url, wrong } from './harness.mjs';

const browser = await launchBrowser();
const patience = { timeout: 60000 };
const follow = async (path) => {
  const page = await open(browser);
  await page.goto(url + path);
  await page.waitForSelector('.follow:not(.lost):has-text("live")', patience);
  return page;
};
const changes = async (page, selector) => {
  await page.waitForSelector(selector, patience);
  const before = await page.locator(selector).first().innerText();
  await page.waitForFunction(([selector, old]) => document.querySelector(selector)?.innerText !== old, [selector, before], patience);
};
const GONE = '.cell.failed, .cell.suspect, .cell.missing';

const transfers = await follow('/jobs/default/transfers');
await transfers.waitForFunction(() => document.querySelector('#moves dl')?.innerText.includes('4 of 4'), null, patience);
await changes(transfers, '#moves dl');
await transfers.waitForSelector('#pairs tr[data-key]', patience);
await accessible(transfers);

const barriers = await follow('/jobs/default/barriers');
await changes(barriers, '#recent tbody tr');

// A worker is killed, and comes back.
const job = await follow('/jobs/default');
await job.waitForFunction((gone) => document.querySelectorAll('.cell').length === 4 && !document.querySelector(gone), GONE, patience);
const lost = await (await job.waitForFunction((gone) => document.querySelector(gone)?.textContent.trim(), GONE, patience)).jsonValue();
await job.waitForFunction((gone) => !document.querySelector(gone), GONE, patience);
console.log(`task ${lost} was lost and is back`);
await accessible(job);
await job.goto(`${url}/jobs/default/tasks/${lost}`);
const lives = await job.locator('#lives-title + div tbody tr').count();
if (lives < 2) wrong(`the page of task ${lost} tells of ${lives} of its lives`);
await job.goto(`${url}/jobs/default/timeline`);
const first = await job.locator(`.moments li.bad:has-text("task ${lost}")`).count();
if (!first) wrong(`the timeline does not say that task ${lost} was lost`);
await finish(browser);
