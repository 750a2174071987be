// Times as the reader wants them, and charts: with and without JavaScript, by pointer and by keyboard.
import { accessible, finish, launchBrowser, open, url, wrong } from './harness.mjs';

const browser = await launchBrowser();
const ZONE = 'Asia/Tehran';
const main = (page) => page.locator('main').innerText();
const pressed = (page) => page.locator('.times button[aria-pressed=true]').innerText();

// Without JavaScript: relative and UTC, kept by a cookie.
{
  const page = await open(browser, { javaScriptEnabled: false, viewport: { width: 390, height: 800 } });
  await page.goto(`${url}/jobs/train?state=awaited`);
  if (!(await main(page)).includes(' ago')) wrong('times are not relative at first');
  if (await page.locator('.times button[value=local]').isVisible()) wrong('local times are offered without JavaScript');
  await page.click('.times button[value=utc]');
  if (page.url() !== `${url}/jobs/train?state=awaited`) wrong(`the switch leads to ${page.url()}`);
  const text = await main(page);
  if (text.includes(' ago') || !/\d\d:\d\d:\d\d\.\d{3} UTC/.test(text)) wrong(`times are not in UTC: ${text}`);
  await page.goto(`${url}/jobs/train/timeline`);
  if ((await pressed(page)) !== 'UTC' || (await main(page)).includes(' ago')) wrong('the choice is not kept');
  await page.context().addCookies([{ name: 'muster-times', value: 'local', url }]);
  await page.goto(`${url}/jobs/train`);
  const local = await page.locator('body').innerText();
  if (!local.includes('local times need JavaScript') || !/\d{3} UTC/.test(local)) wrong('without JavaScript local times are not UTC with a note');
  await page.context().close();
}

// A fragment has the same digest however times are shown.
{
  const tags = async (times) => {
    const answer = await fetch(`${url}/jobs/idle`, { headers: { cookie: `muster-times=${times}` } });
    return [...(await answer.text()).matchAll(/id="([a-z-]+)" data-tag="([0-9a-f]+)"/g)].map(([, id, tag]) => `${id}:${tag}`).join();
  };
  const [relative, utc] = [await tags('relative'), await tags('utc')];
  if (!relative || relative !== utc) wrong(`the digests are ${relative} and ${utc}`);
  for (const [query, path] of [['to=utc&back=//evil.example/', '/'], ['to=utc&back=/audit%3Fjob=a', '/audit?job=a'], ['to=utc', '/']]) {
    const answer = await fetch(`${url}/times?${query}`, { redirect: 'manual' });
    if (answer.headers.get('location') !== path) wrong(`/times?${query} leads to ${answer.headers.get('location')}`);
  }
  if ((await fetch(`${url}/times?to=mars`)).status !== 400) wrong('an unknown style is accepted');
}

// With JavaScript the page switches in place, also to the zone of the browser.
{
  const page = await open(browser, { timezoneId: ZONE, permissions: ['clipboard-read', 'clipboard-write'] });
  await page.goto(`${url}/jobs/train`);
  await page.waitForSelector('.follow:not(.lost):has-text("live")');
  await page.evaluate(() => { window.same = true; });
  await page.focus('.times button[value=local]');
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => /\d\d:\d\d:\d\d\.\d{3} \+03:30/.test(document.querySelector('main').innerText));
  if (!(await page.evaluate(() => window.same))) wrong('the switch loads the page again');
  if ((await pressed(page)) !== 'Local') wrong(`the switch shows ${await pressed(page)}`);
  // The first time of the page, and what copying gives of it, alone and within text: the exact time.
  const told = () => page.evaluate(() => {
    const time = document.querySelector('main time[data-rel^=ago]');
    return { exact: time.dateTime, shown: time.innerText, expected: new Date(time.dateTime).toLocaleTimeString('en-GB') };
  });
  const copied = async (select) => {
    await page.evaluate(select);
    await page.keyboard.press('Control+C');
    return page.evaluate(() => navigator.clipboard.readText());
  };
  let one, alone, around, after;
  // A live update may replace the time in between.
  for (let again = 0; again < 10 && (!after || one.exact !== after.exact); again += 1) {
    one = await told();
    alone = await copied(() => getSelection().selectAllChildren(document.querySelector('main time[data-rel^=ago]')));
    around = await copied(() => getSelection().selectAllChildren(document.querySelector('main time[data-rel^=ago]').parentElement));
    after = await told();
  }
  if (!one.shown.includes(one.expected)) wrong(`${one.exact} is shown as ${one.shown} and not as ${one.expected}`);
  if (alone.trim() !== one.exact) wrong(`copying ${one.shown} gives ${alone}`);
  if (!around.includes(one.exact) || around.includes(one.shown)) wrong(`copying the text around ${one.shown} gives ${around}`);
  if (after.shown !== one.shown) wrong('copying changes the page');

  // The choice is kept, and live updates keep to it.
  await page.goto(`${url}/jobs/train/transfers`);
  await page.waitForSelector('.follow:not(.lost):has-text("live")');
  const before = await page.locator('#moves dl').innerText();
  await page.waitForFunction((old) => document.querySelector('#moves dl').innerText !== old, before, { timeout: 20000 });
  await page.waitForFunction((zone) => [...document.querySelectorAll('[data-zone]')].every((one) => one.textContent === zone), ZONE);
  await accessible(page);
  const kept = page.waitForResponse((answer) => answer.url().includes('/times?to=relative'));
  await page.click('.times button[value=relative]');
  await kept;
  await page.reload();
  if ((await pressed(page)) !== 'Relative') wrong('relative times cannot be chosen again');
  await page.context().close();
}

// Charts: the values under the pointer and under the keys, hidden series, ranges.
{
  const page = await open(browser);
  page.expected.push('ERR_FAILED');
  await page.goto(`${url}/jobs/train/transfers`);
  await page.waitForSelector('#throughput .uplot canvas', { timeout: 40000 });
  // The page keeps what it has, and the table gets an hour of values.
  await page.route('**/live?*', (route) => route.abort());
  await page.reload();
  await page.waitForSelector('#throughput .uplot canvas');
  await page.waitForSelector('#offline:not([hidden])');
  await page.evaluate(() => {
    const rows = document.querySelector('#throughput-table tbody');
    for (let step = 0; step < 370; step += 1) {
      const row = rows.rows[0].cloneNode(true);
      row.dataset.at = Number(row.dataset.at) - 10e6;
      rows.prepend(row);
    }
    document.dispatchEvent(new CustomEvent('muster-draw', { detail: document }));
  });
  const chart = page.locator('#throughput-plot');
  const read = () => chart.locator('.readout').innerText();
  const range = () => chart.locator('.ranges button[aria-pressed=true]').allInnerTexts();
  if ((await chart.locator('.ranges button').allInnerTexts()).join() !== '1 min,10 min,1 h,all') wrong(`the ranges are ${await chart.locator('.ranges button').allInnerTexts()}`);
  await chart.scrollIntoViewIfNeeded();
  const over = await chart.locator('.u-over').boundingBox();
  await page.mouse.move(over.x + over.width / 2, over.y + over.height / 2);
  const [, first] = (await read()).match(/UTC: (shm|tcp) [\d.]+ [KM]iB\/s/) ?? [];
  if (!first) wrong(`under the pointer the chart says ${await read()}`);

  await chart.locator('.ranges button:has-text("10 min")').click();
  if ((await range()).join() !== '10 min') wrong(`the range is ${await range()}`);
  await page.mouse.move(over.x + over.width * 0.2, over.y + 30);
  await page.mouse.down();
  await page.mouse.move(over.x + over.width * 0.6, over.y + 30, { steps: 4 });
  await page.mouse.up();
  if ((await range()).length) wrong(`after dragging the range is ${await range()}`);
  await page.mouse.dblclick(over.x + over.width / 2, over.y + 30);
  if ((await range()).join() !== 'all') wrong(`after a double click the range is ${await range()}`);

  // By keyboard.
  await chart.focus();
  await page.keyboard.press('End');
  const last = await read();
  await page.keyboard.press('ArrowLeft');
  if (!last || (await read()) === last) wrong(`arrow keys lead from ${last} to ${await read()}`);
  await page.keyboard.press('+');
  if ((await range()).length) wrong('plus does not zoom');
  await page.keyboard.press('Escape');
  if ((await range()).join() !== 'all') wrong('Escape does not show all');
  const key = page.locator('#throughput .key').first();
  const name = (await key.innerText()).split(' ')[0];
  await key.focus();
  await page.keyboard.press('Enter');
  if ((await key.getAttribute('aria-pressed')) !== 'false') wrong('a key does not hide its series');
  await chart.focus();
  await page.keyboard.press('Home');
  if ((await read()).includes(`${name} `)) wrong(`the hidden ${name} is read as ${await read()}`);
  await key.click();
  if ((await key.getAttribute('aria-pressed')) !== 'true') wrong('a key does not show its series again');
  await accessible(page);

  await page.goto(`${url}/jobs/train/tasks/3`);
  await page.waitForSelector('#course canvas');
  await page.focus('#course');
  await page.keyboard.press('End');
  if (!/UTC: gap [\d.]+ m?s/.test(await page.locator('#course .readout').innerText())) wrong(`a gap is read as ${await page.locator('#course .readout').innerText()}`);
  await page.focus('#gaps');
  await page.keyboard.press('Home');
  if (!/: heartbeats \d/.test(await page.locator('#gaps .readout').innerText())) wrong(`a class of gaps is read as ${await page.locator('#gaps .readout').innerText()}`);
  await accessible(page);
  await page.context().close();
}
await finish(browser);
