// From the overview to excluding a task, so that the others pass, by keyboard alone.
import { ask, finish, launchBrowser, open, url, wrong } from './harness.mjs';

const browser = await launchBrowser();
const page = await open(browser);
const focused = () => page.evaluate(() => {
  const it = document.activeElement;
  return { name: it.getAttribute('aria-label') ?? it.textContent.trim(), field: it.name ?? '', outline: getComputedStyle(it).outlineStyle };
});
// Presses Tab until the focused element matches.
const tabTo = async (like, most = 80) => {
  for (let at = 0; at < most; at += 1) {
    await page.keyboard.press('Tab');
    const now = await focused();
    if (now.outline === 'none') wrong(`the focus on "${now.name}" does not show`);
    if (like(now)) return now;
  }
  throw new Error('the Tab key does not lead there');
};
const settle = () => page.waitForLoadState('load');

await page.goto(`${url}/`);
// If the server requires tokens, the field for the token has the focus.
if (process.env.MUSTER_TOKEN) {
  await page.waitForURL('**/login?next=*');
  await page.waitForFunction(() => document.activeElement?.matches('input[type=password]'));
  await page.keyboard.type(process.env.MUSTER_TOKEN);
  await page.keyboard.press('Enter');
  await page.waitForURL(`${url}/`);
  await settle();
}
await tabTo(({ name }) => name.startsWith('Skip'));
await page.keyboard.press('Enter');
const act = await tabTo(({ name }) => name.startsWith('Exclude task'));
if (!act.name.includes('6')) wrong(`the overview names another task: ${act.name}`);
await page.keyboard.press('Enter');
await page.waitForURL('**/tasks/6#exclude');
await settle();
await tabTo(({ field }) => field === 'reason');
await page.keyboard.type('does not come; stack is in the ticket');
await page.keyboard.press('Enter');
await page.waitForSelector('h1:has-text("Exclude task 6")');
const would = await page.locator('.would').innerText();
if (!/passes/.test(would)) wrong(`the preview does not say that the barrier passes: ${would}`);
await tabTo(({ name }) => name === 'Exclude task 6');
await page.keyboard.press('Enter');
await page.waitForSelector('.notice');
await ask('passed');
const standing = await page.locator('.standing .big').innerText();
if (!/excluded/i.test(standing)) wrong(`the task stands as ${standing}`);

// And back.
await tabTo(({ field }) => field === 'reason');
await page.keyboard.type('repaired');
await page.keyboard.press('Enter');
await page.waitForSelector('.notice:has-text("lifted")');
await page.goto(`${url}/audit`);
const audit = await page.locator('main').innerText();
for (const part of ['does not come; stack is in the ticket', 'repaired', 'readmit', 'by a page']) {
  if (!audit.includes(part)) wrong(`the audit does not say ${part}: ${audit}`);
}
// The examples for programs contain a token exactly if the server requires one.
await page.goto(`${url}/api`);
const examples = await page.locator('.examples').innerText();
if (examples.includes('-H "Authorization: Bearer $MUSTER_TOKEN"') !== Boolean(process.env.MUSTER_TOKEN)) wrong(`the examples do not fit this server: ${examples}`);
await finish(browser);
