// The overview of a server to which no task has come, then with tasks; the search; tables as JSON and CSV; copying.
import { accessible, ask, finish, launchBrowser, open, url, wrong } from './harness.mjs';

const browser = await launchBrowser();
const host = new URL(url).hostname;
const { grpc } = await (await fetch(`${url}/api/v1/server`)).json();
const port = grpc[0].address.split(':').at(-1);
const expected = `export JAX_COORDINATOR_ADDRESS=${host}:${port}\nexport JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0`;

// While no task has come, the two variables of this server can be copied.
const page = await open(browser, { permissions: ['clipboard-read', 'clipboard-write'] });
await page.goto(`${url}/`);
{
  const plain = await open(browser, { javaScriptEnabled: false, viewport: { width: 390, height: 800 } });
  await plain.goto(`${url}/`);
  const code = await plain.locator('#start pre').innerText();
  if (code.trim() !== expected) wrong(`a program is pointed at this server by ${code}`);
  if (await plain.locator('.copy').count()) wrong('without JavaScript there are buttons that do nothing');
  await plain.context().close();
  // The address is the one under which the reader came.
  const named = await (await fetch(`http://localhost:${new URL(url).port}/`)).text();
  if (!named.includes(`JAX_COORDINATOR_ADDRESS=${host}:${port}`)) wrong('the address of a listener on one address is not that address');
}
await page.focus('#start .copy');
await page.keyboard.press('Enter');
await page.waitForSelector('#start .copy.done');
const copied = await page.evaluate(() => navigator.clipboard.readText());
if (copied !== expected) wrong(`copied is ${copied}`);
await accessible(page);
// Without the clipboard of secure pages, the button copies too.
await page.evaluate(() => { Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true }); });
await page.waitForSelector('#start .copy:not(.done)');
await page.click('#start .copy');
await page.waitForSelector('#start .copy.done');

await page.waitForSelector('.follow:not(.lost):has-text("live")');
await ask('register');
await page.waitForFunction(() => !document.querySelector('#start pre'), null, { timeout: 20000 });

// The last minutes of a job: a picture whose numbers are in JSON, which grows on the open page.
await page.waitForSelector('.sparkline .lives', { timeout: 40000 });
const { step_seconds: length, steps } = await (await fetch(`${url}/api/v1/jobs/train/activity`)).json();
if (length !== 10 || !steps.length || steps.at(-1).tasks !== 8) wrong(`the activity is ${JSON.stringify(steps)}`);
const lowest = Math.min(...steps.map(({ live }) => live).filter((live) => live !== null));
const described = await page.locator('.sparks a').first().getAttribute('aria-label');
if (!described.includes(`${lowest}`) || !described.includes('of 8 tasks live')) wrong(`the picture is described as ${described}, and the lowest number is ${lowest}`);
await page.waitForSelector('.sparkline .peaks', { timeout: 40000 });
const drawn = await page.locator('.sparks').first().innerHTML();
await page.waitForFunction((drawn) => document.querySelector('.sparks').innerHTML !== drawn, drawn, { timeout: 40000 });
await accessible(page);

// The search finds barriers and keys by their names, and says what each is.
const found = async (words) => {
  await page.goto(`${url}/search?q=${encodeURIComponent(words)}`);
  return page.locator('main').innerText();
};
const barrier = await found('TRAIN/st');
if (!/Barriers\s+train\/step barrier of train, in progress: \d of 8 arrived/.test(barrier)) wrong(`a barrier is found as ${barrier}`);
await page.click('.results a:has-text("train/step")');
await page.waitForURL(/jobs.train.barriers.barrier=train.*step/);
const key = await found('local_topology/cuda/3');
if (!/Keys\s+cuda:local_topology\/cuda\/3 key of train, \d+ B/.test(key)) wrong(`a key is found as ${key}`);
await accessible(page);
await page.click('.results a:has-text("cuda/3")');
await page.waitForURL('**/jobs/train/keys/value?key=*');
await page.waitForSelector('.crumbs .copy');

// Tables as JSON and CSV, by the links of their pages.
for (const [path, links, heading] of [
  ['/jobs/train', ['tasks', 'runs'], 'task,state,since'], ['/jobs/train/hosts', ['hosts'], 'host,state,tasks'],
  ['/jobs/train/barriers', ['barriers'], 'barrier,use,kind'], ['/jobs/train/devices', ['devices'], 'global_id,task'],
  ['/jobs/train/transfers', ['transfers', 'transfers/tasks'], 'from,to,transport'],
  ['/jobs/train/exclusions', ['exclusions'], 'number,target'], ['/jobs/train/timeline', ['events'], 'number,time,run'],
]) {
  await page.goto(url + path);
  await page.waitForSelector('.exports', { timeout: 30000 });
  const addresses = await page.locator('.exports a').evaluateAll((all) => all.map((link) => link.getAttribute('href')));
  const wanted = links.flatMap((link) => [`/api/v1/jobs/train/${link}`, 'format=csv']);
  if (addresses.length !== wanted.length || wanted.some((part) => !addresses.some((address) => address.includes(part)))) wrong(`${path} has the links ${addresses}`);
  const tables = [];
  for (const address of addresses) {
    const answer = await fetch(url + address);
    const kind = address.includes('format=csv') ? 'text/csv' : 'application/json';
    if (answer.status !== 200 || !answer.headers.get('content-type').startsWith(kind)) wrong(`${address} answers ${answer.status} ${answer.headers.get('content-type')}`);
    const text = await answer.text();
    if (kind === 'text/csv') tables.push(text);
  }
  if (!tables.some((table) => table.startsWith(heading))) wrong(`${path}: no table begins with ${heading}: ${tables}`);
}
await finish(browser);
