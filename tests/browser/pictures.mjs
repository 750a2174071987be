// Takes screenshots of the pages: light and dark, wide and narrow.
import { mkdirSync } from 'node:fs';
import { ask, finish, launchBrowser, open, url } from './harness.mjs';

const out = process.env.MUSTER_PICTURES ?? '../../target/pictures';
mkdirSync(out, { recursive: true });
const browser = await launchBrowser();
const wide = { width: 1400, height: 900 };
const narrow = { width: 420, height: 844 };
const take = async (name, path, options, full = true) => {
  const page = await open(browser, options);
  page.expected.push('404');
  await page.goto(url + path);
  await page.waitForTimeout(900);
  await page.screenshot({ path: `${out}/${name}.png`, fullPage: full });
  await page.context().close();
};
const [{ tasks }] = (await (await fetch(`${url}/api/v1/jobs`)).json()).jobs.filter(({ name }) => name === 'train');
const many = tasks > 1000 ? 'many-' : '';
const pages = (many ? '/ /jobs/train /jobs/train?state=trouble&sort=state /jobs/train/tasks/6 /jobs/train/barriers' : process.env.MUSTER_PAGES ?? '/ /jobs/train /jobs/eval /jobs/fails /jobs/fails/tasks/0 /jobs/fails/timeline /jobs/train/barriers /jobs/train/tasks/6 /jobs/train/tasks/5 /jobs/train/timeline /jobs/train/devices /jobs/train/transfers /jobs/idle/transfers /jobs/train/keys /jobs/train/exclusions /jobs/train/drain /audit /api /guide/start /guide/findings /transfers /jobs/nobody').split(' ');
if (!many && !process.env.MUSTER_README_PICTURES) {
  // And a failed run.
  const job = { name: 'fails', settings: { tasks: 3, recoverable: false }, reason: 'to see it fail' };
  await fetch(`${url}/api/v1/jobs`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(job) });
  await ask('fail');
}
const name = (path) => many + (path.slice(1).replaceAll(/[/?&=]/g, '-') || 'overview');
for (const path of pages) {
  await take(`${name(path)}-light`, path, { viewport: wide, colorScheme: 'light' });
}
for (const path of ['/', '/jobs/train', '/jobs/fails', '/jobs/train/tasks/6', '/jobs/train/barriers', '/jobs/train/transfers', '/audit', '/api', '/guide/start'].filter((path) => pages.includes(path))) {
  await take(`${name(path)}-dark`, path, { viewport: wide, colorScheme: 'dark' });
  await take(`${name(path)}-narrow`, path, { viewport: narrow, colorScheme: 'light' });
  await take(`${name(path)}-narrow-dark`, path, { viewport: narrow, colorScheme: 'dark' });
}
if (process.env.MUSTER_README_PICTURES && !many) {
  const out = '../../web/screenshots';
  mkdirSync(out, { recursive: true });
  const [wide, narrow] = [{ width: 1200, height: 820 }, { width: 390, height: 820 }];
  const shown = [
    ['job-light', '/jobs/train', 'light', wide],
    ['overview-dark', '/', 'dark', wide],
    ['overview-light-narrow', '/', 'light', narrow],
    ['job-dark-narrow', '/jobs/train', 'dark', narrow],
  ];
  for (const [name, path, colorScheme, viewport] of shown) {
    const page = await open(browser, { viewport, colorScheme });
    await page.goto(url + path);
    await page.waitForTimeout(900);
    await page.screenshot({ path: `${out}/${name}.png` });
    await page.context().close();
  }
}
await finish(browser);
