// The five questions of a user: each is answered on the first screen of the page to which one click on the overview leads. The
// reader is simulated: it knows no address, and chooses the link by its text.
import { finish, launchBrowser, open, url, wrong } from './harness.mjs';

const browser = await launchBrowser();
const page = await open(browser);

// The text that is on the screen without scrolling.
const onScreen = () => page.evaluate(() => {
  const seen = [];
  const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const { top, bottom, width } = range.getBoundingClientRect();
    if (width > 0 && bottom > 0 && top < innerHeight) seen.push(node.textContent);
  }
  return seen.join(' ').replace(/\s+/g, ' ');
});

// Two hosts have been late often enough to be an issue.
await page.goto(`${url}/`);
await page.waitForSelector('.need h3:has-text("late at nearly every barrier")', { timeout: 60000 });

const answer = async (question, link, expected) => {
  const began = Date.now();
  await page.goto(`${url}/`, { waitUntil: 'load' });
  // The link is on the first screen of the overview, too.
  const found = page.locator(`main ${link}`).first();
  const box = await found.boundingBox().catch(() => null);
  if (!box || box.y + box.height > 900) return wrong(`${question}: the overview shows no link ${link}`);
  await Promise.all([page.waitForEvent('load'), found.click()]);
  const text = await onScreen();
  for (const part of expected) if (!part.test(text)) wrong(`${question}: ${page.url()} does not show ${part} on its first screen: ${text}`);
  if (process.env.MUSTER_PICTURES) await page.screenshot({ path: `${process.env.MUSTER_PICTURES}/question-${question.replaceAll(/\W+/g, '-')}.png` });
  console.log(`${question} One click, ${Date.now() - began} ms: ${new URL(page.url()).pathname}`);
};

await answer('Who holds up the job?', '.need h3 a:has-text("train")', [/2 tasks are late at nearly every barrier/, /Host boot-7a12/, /all 2 tasks \(2–3\)/]);
await answer('What failed first?', 'a:has-text("changes since 1 (failed)")', [/First cause/, /task 5/, /connection/]);
await answer('Which host is it?', '.culprits a:has-text("Host")', [/boot-7a12/, /2–3/, /arrives at barriers/]);
await answer('What changed since the last run?', 'a:has-text("changes since 1")', [/From run 1 to run 2: 8 tasks are on another host; 32 devices have changed/, /host boot-7a12 is late in the later run only/]);
await answer('Is the network slow, or the program?', '.need h3 a:has-text("train")', [/heartbeats come on time, so look at the work, the input and the speed of the host first, and not at the network/]);
await finish(browser);
