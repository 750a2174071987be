// Every page, with and without JavaScript, and the delay of changes.
import { accessible, ask, finish, launchBrowser, open, url, walk, wrong } from './harness.mjs';

const browser = await launchBrowser();
const pages = [
  '/', '/transfers', '/audit', '/api', '/guide/start', '/guide/arrays', '/guide/data', '/guide/live', '/guide/preemption',
  '/guide/resharding', '/guide/platforms', '/guide/pages', '/guide/troubleshooting', '/guide/sick-host', '/guide/stacks', '/guide/collectives', '/guide/states', '/guide/findings', '/guide/alerts',
  '/guide/operations', '/guide/restarts', '/guide/security', '/guide/languages', '/guide/glossary', '/search', '/search?q=6', '/search?q=%3Cscript%3E', '/search?q=train', '/jobs/train', '/jobs/eval', '/jobs/idle', '/jobs/train/hosts', '/jobs/train/hosts?by=lateness', '/jobs/train/hosts?state=down&find=nobody',
  '/jobs/train/hosts/boot-7a13', '/jobs/train/barriers', '/jobs/train/barriers?scale=own', '/jobs/train/barriers?open=1/19/train/step&by=task', '/jobs/train/stacks', '/jobs/train/collectives', '/jobs/train/timeline', '/jobs/train/timeline?by=task', '/jobs/train/hosts?by=bytes', '/jobs/train/runs/1', '/jobs/train/runs/1/hosts', '/jobs/train/runs/1/barriers',
  '/jobs/train/runs/1/timeline', '/jobs/train/runs/1/transfers', '/jobs/train/runs/1/tasks/6', '/jobs/train/runs/1/comparison',
  '/jobs/train/timeline?task=6', '/jobs/train/transfers', '/jobs/idle/transfers', '/jobs/train/transfers?task=3&transport=tcp',
  '/jobs/train/devices', '/jobs/train/keys', '/jobs/train/keys?prefix=orbax',
  '/jobs/train/keys/value?key=orbax/distributed_to_device_ids/3', '/jobs/train/keys/value?key=cuda%253Alocal_topology/cuda/2',
  '/jobs/train/exclusions', '/jobs/train/drain', '/jobs/train/tasks/6', '/jobs/train/tasks/0',
  '/jobs/train?state=awaited&sort=score', '/jobs/train?find=%3Cscript%3E&sort=nothing&page=99',
];
await walk(browser, pages);

// Pages that do not exist.
{
  const page = await open(browser);
  page.expected.push('404');
  for (const path of ['/jobs/nobody', '/jobs/train/tasks/99', '/jobs/train/hosts/nobody', '/nothing', '/guide/nothing', '/jobs/train/keys/value?key=none']) {
    const answer = await page.goto(url + path);
    if (answer.status() !== 404) wrong(`${path} answers ${answer.status()}`);
    if (!(await page.locator('main h1').count())) wrong(`${path} says nothing to people`);
    await accessible(page);
  }
  await page.context().close();
}

// Without JavaScript: the same facts, filters and forms.
{
  const page = await open(browser, { javaScriptEnabled: false });
  await page.goto(`${url}/jobs/train`);
  const text = await page.locator('main').innerText();
  for (const fact of ['Task 6', 'connected, not at any barrier', '7 of 8', 'train/step', ' ago']) {
    if (!text.includes(fact)) wrong(`without JavaScript the job does not say ${fact}`);
  }
  if (await page.locator('#waits .culprits').count()) wrong('who is awaited is named twice');
  await page.selectOption('select[name=state]', 'awaited');
  await page.click('.filter button');
  if ((await page.locator('#tasks tbody tr').count()) !== 1) wrong('without JavaScript the filter does not filter');
  await page.click('th a:has-text("Score")');
  if (!page.url().includes('sort=score') || !page.url().includes('state=awaited')) wrong(`sorting forgets: ${page.url()}`);
  await page.goto(`${url}/jobs/train/tasks/6`);
  const meetings = await page.locator('#meetings tbody tr').allInnerTexts();
  if (meetings.length > 4 || !meetings[0].includes('20 times') || !meetings[0].includes('last')) wrong(`barriers that are alike are not one line: ${meetings.join(' | ')}`);
  page.expected.push('422');
  await page.fill('#exclude input[name=reason]', '   ');
  await page.click('#exclude button');
  const said = await page.locator('.error').innerText().catch(() => '');
  if (!said.includes('reason')) wrong(`an empty reason is not explained in place: ${said}`);
  await page.context().close();
}

// The guide: each page is whole without JavaScript, and its sections are listed beside it.
{
  const page = await open(browser, { javaScriptEnabled: false });
  await page.goto(`${url}/guide/start`);
  const links = await page.locator('.guide > nav > ul > li > a').evaluateAll((all) => all.map((link) => link.getAttribute('href')));
  const unlisted = pages.filter((path) => path.startsWith('/guide/') && !links.includes(path));
  const unwalked = links.filter((path) => !pages.includes(path));
  if (unlisted.length || unwalked.length) wrong(`the guide does not list ${unlisted}, and this test does not open ${unwalked}`);
  for (const path of links) {
    await page.goto(url + path);
    const [title] = await page.locator('.prose h1').allInnerTexts();
    if (!title) wrong(`${path} has no title`);
    const current = await page.locator('.guide > nav a[aria-current="page"]').getAttribute('href');
    if (current !== path) wrong(`${path} is shown as ${current}`);
    const beside = await page.locator('.guide > nav ul ul a').evaluateAll((all) => all.map((link) => link.getAttribute('href').slice(1)));
    const sections = await page.locator('.prose h2').evaluateAll((all) => all.map((heading) => heading.id));
    if (beside.join() !== sections.join()) wrong(`${path} has the sections ${sections}, and lists ${beside}`);
  }
  await page.context().close();
}

// Transfers: complete without JavaScript, live with it. The first cause comes first, and a job without reports has an explanation.
{
  const page = await open(browser, { javaScriptEnabled: false });
  await page.goto(`${url}/jobs/train/transfers`);
  const text = await page.locator('main').innerText();
  for (const fact of ['8 of 8', 'first cause', 'peer_dead', 'stalled', 'shm', 'tcp', '8 unix', '8 tcp']) {
    if (!text.includes(fact)) wrong(`without JavaScript the transfers do not say ${fact}`);
  }
  if ((await page.locator('.matrix tbody tr').count()) !== 8) wrong('eight tasks are not a table of all with all');
  if (!(await page.locator('svg.chart path[class^=t-]').count())) wrong('without JavaScript there is no chart');
  await page.fill('.filter input[name=task]', '3');
  await page.selectOption('.filter select', 'tcp');
  await page.click('.filter button');
  if ((await page.locator('#pairs tr[data-key]').count()) !== 2) wrong('the pairs of task 3 by tcp are not two');
  await page.goto(`${url}/jobs/idle/transfers`);
  const empty = await page.locator('#moves .empty').innerText();
  for (const fact of ['do not pass through Muster', 'muster worker']) {
    if (!empty.includes(fact)) wrong(`who reports nothing is not told ${fact}`);
  }
  await page.goto(`${url}/transfers`);
  if (!(await page.locator('main').innerText()).includes('8 / 8')) wrong('the list of jobs does not say who reports');
  await page.goto(`${url}/jobs/train/tasks/3`);
  if (!(await page.locator('#task-moves').innerText()).includes('stalled')) wrong('the page of a task does not say which of its transfers failed');
  await page.context().close();
}
{
  const page = await open(browser);
  await page.goto(`${url}/jobs/train/transfers`);
  await page.waitForSelector('.follow:not(.lost):has-text("live")');
  const sent = () => page.locator('#moves dl').innerText();
  const before = await sent();
  await page.waitForFunction((old) => document.querySelector('#moves dl').innerText !== old, before, { timeout: 20000 });
  for (const chart of ['#throughput', '#pair-throughput']) {
    await page.waitForSelector(`${chart} .uplot canvas`, { timeout: 30000 });
    if (await page.locator(`${chart} svg.chart`).isVisible()) wrong(`${chart} has two charts`);
  }
  await page.goto(`${url}/jobs/train/transfers?task=3`);
  const named = await page.locator('#pair-throughput .key').allInnerTexts();
  if (!named.length || named.some((name) => !/\b3 to |to 3 /.test(name))) wrong(`the pairs of task 3 are drawn as ${named.join('; ')}`);
  await accessible(page);
  await page.context().close();
}

// A failed run: its first cause, and the consequences.
{
  const made = await fetch(`${url}/api/v1/jobs`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ name: 'fails', settings: { tasks: 3, recoverable: false }, reason: 'to see it fail' }),
  });
  if (made.status !== 201) wrong(`a job is not made: ${made.status} ${await made.text()}`);
  await ask('fail');
  const page = await open(browser);
  await page.goto(`${url}/jobs/fails`);
  await page.waitForSelector('.chip.bad:has-text("failed")', { timeout: 20000 });
  for (const part of ['.need.bad:has-text("Run 1 failed")', '.need.bad .text:has-text("First cause: task ")', '.need.bad a:has-text("Task ")', '.moments .following', '#tasks tr.failed .follows']) {
    if (!(await page.locator(part).count())) wrong(`the page of a failed run has no ${part}`);
  }
  // Each issue is shown once, in words for people; the error that clients received can be unfolded.
  if (await page.locator('.cause').count()) wrong('the page of a failed run tells its cause twice');
  const seen = await page.locator('main').innerText();
  if (seen.includes('The following tasks are unhealthy')) wrong(`the page of a failed run speaks as to clients: ${seen}`);
  await page.click('.need.bad summary');
  if (!(await page.locator('.need.bad .told').innerText()).includes('The following tasks are unhealthy')) wrong('the whole error is nowhere');
  await accessible(page);
  for (const path of ['/', '/jobs/fails/tasks/1', '/jobs/fails/timeline', '/jobs/fails/barriers', '/jobs/fails/drain']) {
    await page.goto(url + path);
    await accessible(page);
  }
  await page.goto(`${url}/jobs/fails/timeline`);
  if (!(await page.locator('.cause a:has-text("Task ")').count())) wrong('the timeline of a failed run has no first cause');
  await page.context().close();
}

// The heartbeat gaps of a task: as a chart, and as a table beside the timeout.
{
  const page = await open(browser);
  await page.goto(`${url}/jobs/train/tasks/3`);
  await page.waitForSelector('#course canvas');
  const table = page.locator('#course-table');
  const points = await table.locator('tbody tr').count();
  if (points < 2) wrong(`the course of heartbeats has ${points} points`);
  if ((await table.getAttribute('data-timeout')) !== '10000000') wrong('the course does not know the timeout');
  const known = await page.locator('#course').evaluate((place) => place.drawn);
  await page.waitForFunction((known) => document.querySelector('#course').drawn !== known, known, { timeout: 20000 });
  // The history is thinned when it is full: until the page has followed, it shows more points than REST.
  let shown, told;
  for (let attempt = 0; attempt < 20; attempt++) {
    shown = await table.locator('tbody tr').count();
    told = (await (await fetch(`${url}/api/v1/jobs/train/tasks/3`)).json()).recent_gaps.length;
    if (told >= shown) break;
    await page.waitForTimeout(500);
  }
  if (told < shown) wrong(`the REST API tells of ${told} gaps, the page of ${shown}`);
  await page.context().close();
}

// Live lists: changes by others show on the pages of exclusions, of the task, of the drain and of the audit.
{
  const pages = {};
  for (const path of ['/jobs/eval/exclusions', '/jobs/eval/tasks/3', '/audit', '/jobs/train/drain']) {
    pages[path] = await open(browser);
    await pages[path].goto(url + path);
    await pages[path].waitForSelector('.follow:not(.lost):has-text("live")');
  }
  const act = async (method, path, body) => {
    const answer = await fetch(`${url}/api/v1/jobs/${path}`, { method, headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) });
    if (!answer.ok) wrong(`${method} ${path} answers ${answer.status} ${await answer.text()}`);
    return answer.json();
  };
  const shows = (path, selector) => pages[path].waitForSelector(selector, { timeout: 10000 }).catch(() => wrong(`${path} does not come to show ${selector}`));
  const half = '/jobs/eval/tasks/3';
  await pages[half].fill('#exclude-form input[name=reason]', 'half a sentence');
  const { id } = await act('POST', 'eval/exclusions', { host: '192.0.2.7', reason: 'another host' });
  await shows('/jobs/eval/exclusions', '#exclusions article:has-text("192.0.2.7")');
  await shows('/audit', '#audit tr:has-text("another host")');
  if ((await pages[half].inputValue('#exclude-form input[name=reason]')) !== 'half a sentence') wrong('what was typed is lost');
  const own = await act('POST', 'eval/exclusions', { task: 3, reason: 'a bad fan' });
  await shows(half, '#exclude h2:has-text("Excluded")');
  // A form from the stream works like one of a loaded page.
  await pages[half].fill('#exclude input[name=reason]', 'a new fan');
  await pages[half].click('#exclude button');
  await shows(half, '.notice:has-text("lifted")');
  await shows('/jobs/eval/exclusions', '#exclusions table tr:has-text("a new fan")');
  if (own.id === id) wrong('two exclusions have one number');
  const list = pages['/jobs/eval/exclusions'];
  await list.fill('#exclusions article:has-text("192.0.2.7") input[name=reason]', 'it was the wrong one');
  await list.click('#exclusions article:has-text("192.0.2.7") button');
  await shows('/audit', '#audit tr:has-text("it was the wrong one")');
  await act('POST', 'train/drain', { reason: 'to see it', in_seconds: 0 });
  await shows('/jobs/train/drain', '#ask:has-text("already being drained")');
  for (const page of Object.values(pages)) { await accessible(page); await page.context().close(); }
}

// The delay of a change: the connection of a task breaks, and the task comes back.
{
  const page = await open(browser);
  await page.goto(`${url}/jobs/train`);
  await page.waitForSelector('.follow:not(.lost):has-text("live")');
  const waits = [];
  for (let round = 0; round < 3; round += 1) {
    for (const [act, shown] of [['lose 6', '.cell.suspect, .cell.failed'], ['restart 6', '.cells:not(:has(.cell.suspect, .cell.failed, .cell.missing))']]) {
      const seen = page.waitForSelector(shown, { timeout: 30000 }).then(() => Date.now());
      const began = Date.now();
      await ask(act);
      waits.push((await seen) - began);
      await page.waitForTimeout(1200);
    }
  }
  waits.sort((a, b) => a - b);
  console.log(`changes are shown after ${waits.join(', ')} ms`);
  if (waits[Math.floor(waits.length / 2)] > 2500) wrong(`changes take ${waits} ms to show`);

  // A page that was patched equals a new page, except for times.
  await page.waitForTimeout(2500);
  const says = (one) => one.evaluate(() => ['head', 'needs', 'waits', 'grid', 'tasks'].map((id) => {
    const part = document.getElementById(id).cloneNode(true);
    part.querySelectorAll('time, .gap').forEach((time) => time.remove());
    return part.textContent.replace(/\s+/g, ' ');
  }).join('\n'));
  const fresh = await open(browser);
  let [here, there] = ['', '-'];
  // The state may change between the two reads, but not every time.
  for (let look = 0; look < 5 && here !== there; look += 1) {
    if (look > 0) await page.waitForTimeout(1500);
    await fresh.goto(`${url}/jobs/train`);
    [here, there] = [await says(page), await says(fresh)];
  }
  if (here !== there) wrong(`what was followed says ${here}, a new page ${there}`);
  await fresh.context().close();

  // Nothing changes on a page merely because time passes, and the focus stays.
  await page.focus('a.cell[aria-label^="Task 3"]');
  await page.waitForTimeout(2500);
  const focused = await page.evaluate(() => document.activeElement.getAttribute('aria-label') ?? '');
  if (!focused.startsWith('Task 3')) wrong(`the focus has gone to ${focused}`);

  // A page that loses its stream says so and reconnects by itself.
  page.expected.push('ERR_FAILED');
  await page.route('**/live?*', (route) => route.abort());
  await page.reload();
  await page.waitForSelector('#offline:not([hidden])', { timeout: 20000 });
  await page.unroute('**/live?*');
  await page.waitForSelector('#offline', { state: 'hidden', timeout: 40000 });
  await page.context().close();
}
await finish(browser);
