// The search: a key focuses it on every page, and it finds jobs, tasks and hosts, also without JavaScript.
import { accessible, finish, launchBrowser, open, url, wrong } from './harness.mjs';

const browser = await launchBrowser();
const page = await open(browser);
const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.name || document.activeElement.nodeName);
const search = async (words) => {
  await page.keyboard.press('/');
  if ((await focused()) !== 'search') wrong(`on ${page.url()} the key / leads to ${await focused()}`);
  await page.keyboard.type(words);
  await page.keyboard.press('Enter');
  await page.waitForFunction((words) => document.querySelector('main').innerText.includes(`“${words}”`), words);
  return page.locator('main').innerText();
};

for (const path of ['/', '/jobs/train', '/jobs/train/tasks/6', '/guide/start', '/audit']) {
  await page.goto(url + path);
  if (!(await page.locator('.search kbd').isVisible())) wrong(`${path} does not show the key of the search`);
  await page.keyboard.press('/');
  if ((await focused()) !== 'search') wrong(`on ${path} the key / leads to ${await focused()}`);
}

// A task number finds the task of every job; from there to its page by keyboard alone.
await page.goto(`${url}/`);
const six = await search('task 6');
if (!six.includes('Task 6 of train') || six.includes('of eval')) wrong(`task 6 is searched for, and found is ${six}`);
await accessible(page);
await page.getByRole('link', { name: 'Task 6 of train' }).focus();
await page.keyboard.press('Enter');
await page.waitForURL('**/jobs/train/tasks/6');

const job = await search('eva');
if (!/Jobs\s+eval/.test(job)) wrong(`job eval is not found: ${job}`);
const host = await search('127.0.0');
if (!host.includes('8 tasks of train: 0–7')) wrong(`the host of job train is not found: ${host}`);
await page.getByRole('link', { name: '127.0.0.1' }).first().click();
await page.waitForURL('**/jobs/*/hosts/127.0.0.1');
const none = await search('<script>nothing');
if (!none.includes('No job, task, host, barrier or key matches “<script>nothing”')) wrong(`nothing is said of nothing: ${none}`);

// In a field the key types a slash.
await page.goto(`${url}/jobs/train`);
await page.fill('.filter input[name=find]', '');
await page.focus('.filter input[name=find]');
await page.keyboard.type('train/step');
if ((await page.inputValue('.filter input[name=find]')) !== 'train/step') wrong('a slash cannot be typed into a field');
await page.context().close();

const plain = await open(browser, { javaScriptEnabled: false });
await plain.goto(`${url}/jobs/train`);
await plain.fill('#search', '3');
await plain.press('#search', 'Enter');
await plain.waitForURL('**/search?q=3');
const found = await plain.locator('main').innerText();
for (const one of ['Task 3 of train', 'Task 3 of eval']) if (!found.includes(one)) wrong(`without JavaScript ${one} is not found: ${found}`);
await finish(browser);
