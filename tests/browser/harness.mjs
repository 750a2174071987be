// Shared by the scripts: a browser, pages that are checked for errors, and requests to the test that runs the script.
import { readFileSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { createRequire } from 'node:module';
import { chromium } from 'playwright-core';

export const url = process.env.MUSTER_URL;
const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

// Asks the test for an action and waits until it is done. Returns the time of the action, if the test tells it.
export const ask = async (wanted) => {
  console.log(`! ${wanted}`);
  const { value } = await answers.next();
  return Number(value.split(' ')[1]);
};

export const wrongs = [];
export const wrong = (text) => {
  console.log(`WRONG: ${text}`);
  wrongs.push(text);
};

export const launchBrowser = async () => {
  const browser = await chromium.launch({ executablePath: process.env.MUSTER_CHROMIUM, args: ['--no-sandbox', '--disable-dev-shm-usage', '--force-color-profile=srgb'] });
  return browser;
};

// Opens a page and checks it: console messages, errors and requests to other hosts are failures.
export const open = async (browser, options = {}) => {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, bypassCSP: false, ...options });
  const page = await context.newPage();
  page.expected = [];
  page.on('console', (message) => {
    if (message.type() !== 'error' && message.type() !== 'warning') return;
    if (page.expected.some((part) => message.text().includes(part))) return;
    wrong(`${page.url()} says on the console: ${message.text()}`);
  });
  page.on('pageerror', (error) => wrong(`${page.url()} fails: ${error}`));
  page.on('request', (request) => {
    if (!request.url().startsWith(`${url}/`) && !request.url().startsWith('data:')) wrong(`${page.url()} asks ${request.url()}`);
  });
  return page;
};

// Returns the relevant results of axe, which is injected from outside, past the page's content security policy. Shadows at the edges of
// scrollable parts are removed before, because axe cannot check contrast on a picture.
export const accessible = async (page) => {
  const client = await page.context().newCDPSession(page);
  await client.send('Runtime.evaluate', { expression: axe });
  const { result } = await client.send('Runtime.evaluate', {
    expression: `(document.adoptedStyleSheets = [new CSSStyleSheet()])[0].replace('.wide, pre { background-image: none !important; }')
      .then(() => axe.run(document, { resultTypes: ['violations'] }))
      .finally(() => { document.adoptedStyleSheets = []; })
      .then((found) => JSON.stringify(found.violations
      .filter(({ impact }) => impact === 'serious' || impact === 'critical')
      .map(({ id, help, nodes }) => ({ id, help, where: nodes.slice(0, 3).map((node) => node.html.slice(0, 200) + ' ' + (node.any[0]?.message ?? '')) }))))`,
    awaitPromise: true,
    returnByValue: true,
  });
  await client.detach();
  for (const found of JSON.parse(result.value)) wrong(`${page.url()}: ${found.id}: ${found.help}: ${found.where.join(' | ')}`);
};

// Returns where the text of a page differs from the text that the server sent, but for times, for numbers, which live updates change, and for
// the buttons that scripts add: without JavaScript a page has the same facts.
const factsOfScripts = (page, sent) => page.evaluate((sent) => {
  const facts = (root) => {
    const main = root.querySelector('main').cloneNode(true);
    main.querySelectorAll('time, [data-rel], [data-zone], [data-own], .u-wrap, .ranges').forEach((part) => part.remove());
    // A chart of what goes on has more or fewer equal labels.
    return main.textContent.replace(/\d[\d.\u202f]*/g, '0').replace(/\s+/g, ' ').replace(/(0 \S+ )\1+/g, '$1').trim();
  };
  const [here, there] = [facts(document), facts(new DOMParser().parseFromString(sent, 'text/html'))];
  if (here === there) return '';
  let at = 0;
  while (here[at] === there[at]) at += 1;
  return `with scripts "${here.slice(at - 40, at + 80)}", without "${there.slice(at - 40, at + 80)}"`;
}, sent);

// Opens each page, light and wide, then dark and narrow: it must load without errors, fit the window, and be accessible.
export const walk = async (browser, paths) => {
  const sizes = [];
  for (const scheme of ['light', 'dark']) {
    const page = await open(browser, { colorScheme: scheme, viewport: { width: scheme === 'dark' ? 390 : 1440, height: 900 } });
    for (const path of paths) {
      const answer = await page.goto(url + path, { waitUntil: 'load' });
      if (answer.status() !== 200) wrong(`${path} answers ${answer.status()}`);
      const policy = answer.headers()['content-security-policy'] ?? '';
      if (!policy.includes("default-src 'none'")) wrong(`${path} has no strict policy: ${policy}`);
      if (await page.locator('[style]:not(.u-wrap, .u-wrap *)').count()) wrong(`${path} has styles within`);
      const beyond = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      if (beyond > 1) wrong(`${path} is ${beyond} px wider than the ${scheme} window`);
      const sent = await answer.text();
      // A live update may have come in; one of a large job may be some seconds older than the page.
      let differ = await factsOfScripts(page, sent);
      for (let again = 0; again < 3 && differ; again += 1) {
        const newer = await (await page.goto(url + path, { waitUntil: 'load' })).text();
        await page.waitForTimeout(3000);
        differ = await factsOfScripts(page, newer);
      }
      if (differ) wrong(`${path}: ${differ}`);
      await accessible(page);
      sizes.push(Buffer.byteLength(sent));
    }
    await page.context().close();
  }
  console.log(`${paths.length} pages, the largest of ${Math.max(...sizes)} bytes`);
};

export const finish = async (browser) => {
  await browser.close();
  process.exit(wrongs.length ? 1 : 0);
};

process.on('unhandledRejection', (error) => { console.log(`WRONG: ${error?.stack ?? error}`); process.exit(1); });
