// Takes the pictures of the guide page "Find the sick host" into web/static: node guide-pictures.mjs MUSTER [STORY | STORY/TASKS]...
// It simulates each story at four sizes, waits until something shows, and makes each picture small with pngquant.
import { execFileSync, spawn } from 'node:child_process';
import { mkdtempSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

const [muster, ...chosen] = process.argv.slice(2);
const [wide, narrow] = [{ width: 1200, height: 820 }, { width: 390, height: 820 }];
const looks = { light: [wide, 'light'], dark: [wide, 'dark'], narrow: [narrow, 'light'], grey: [wide, 'light', 'achromatopsia'] };
const hosts = { 8: 4, 256: 32, 1000: 125, 10000: 1250 };
// For each story: the seconds after which its pictures are taken, and the looks at each size. Each look is there at some size.
const stories = {
  'dead-host': [45, { 8: ['light'], 256: ['light', 'dark', 'narrow'], 1000: ['grey'], 10000: ['light'] }],
  straggler: [50, { 8: ['dark'], 256: ['narrow'], 1000: ['light'], 10000: ['grey'] }],
  partition: [27, { 8: ['grey'], 256: ['light'], 1000: ['narrow'], 10000: ['dark'] }],
  'restart-storm': [55, { 8: ['narrow'], 256: ['grey'], 1000: ['dark'], 10000: ['light'] }],
  healthy: [40, { 8: ['light'], 256: ['dark'], 1000: ['grey'], 10000: ['narrow'] }],
};
// The steps of 10,000 tasks that wait for a host that is five seconds late take longer.
const slower = { 'dead-host': 1, straggler: 2, partition: 1, 'restart-storm': 1, healthy: 1 };
const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });
const browser = await chromium.launch({ executablePath: process.env.MUSTER_CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox', '--force-color-profile=srgb'] });
// The arrivals of 10,000 tasks that one machine simulates are spread over a second or two, so a second late is not late among them.
const fileOf = (story, tasks) => {
  if (story !== 'straggler' || Number(tasks) < 10000) return story;
  const file = join(mkdtempSync(join(tmpdir(), 'story-')), 'straggler.toml');
  writeFileSync(file, String(execFileSync(muster, ['simulate', '--print-story', story])).replace('by = "1s"', 'by = "5s"'));
  return file;
};
// Takes the pictures of one simulation.
const take = async (story, tasks, seconds, names) => {
  const http = `127.0.0.1:${20000 + Number(tasks)}`;
  const simulation = spawn(muster, ['simulate', '--story', fileOf(story, tasks), '--tasks', tasks, '--hosts', hosts[tasks], '--http', http, '--grpc', '127.0.0.1:0'], { stdio: ['ignore', 'pipe', 'inherit'] });
  // The times of the story count from the last registration.
  await new Promise((done) => { simulation.stdout.on('data', (said) => { if (String(said).includes('have registered')) done(); }); });
  await pause(seconds * 1000);
  for (const name of names) {
    const [viewport, colorScheme, deficiency] = looks[name];
    const page = await (await browser.newContext({ viewport, colorScheme })).newPage();
    await page.goto(`http://${http}/jobs/simulation`);
    await page.waitForTimeout(900);
    if (deficiency) await (await page.context().newCDPSession(page)).send('Emulation.setEmulatedVisionDeficiency', { type: deficiency });
    const path = fileURLToPath(new URL(`../../web/static/${story}-${tasks}-${name}.png`, import.meta.url));
    await page.screenshot({ path });
    execFileSync('pngquant', ['--force', '--skip-if-larger', '--strip', '--quality', '50-90', '--output', path, '128', path]);
    await page.context().close();
    console.log(path);
  }
  simulation.kill('SIGINT');
  await new Promise((done) => { simulation.on('exit', done); });
};
for (const which of chosen.length ? chosen : Object.keys(stories)) {
  const [story, only] = which.split('/');
  const [usual, sizes] = stories[story];
  const wanted = Object.entries(sizes).filter(([tasks]) => !only || only === tasks);
  await Promise.all(wanted.map(([tasks, names]) => take(story, tasks, Number(tasks) < 10000 ? usual : usual * slower[story], names)));
}
await browser.close();
