// Takes the pictures of the guide page "Find the sick host" into web/static: node guide-pictures.mjs MUSTER [STORY...]
// It simulates each story at four sizes, waits until something shows, and makes each picture small with pngquant.
import { execFileSync, spawn } from 'node:child_process';
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
const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });
const browser = await chromium.launch({ executablePath: process.env.MUSTER_CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox', '--force-color-profile=srgb'] });
// Takes the pictures of one simulation.
const take = async (story, tasks, seconds, names) => {
  const http = `127.0.0.1:${20000 + Number(tasks)}`;
  const simulation = spawn(muster, ['simulate', '--story', story, '--tasks', tasks, '--hosts', hosts[tasks], '--http', http, '--grpc', '127.0.0.1:0'], { stdio: ['ignore', 'pipe', 'inherit'] });
  // The times of the story count from the last registration.
  await new Promise((done) => { simulation.stdout.on('data', (said) => { if (String(said).includes('have registered')) done(); }); });
  await pause(seconds * 1000);
  for (const name of names) {
    const [viewport, colorScheme, deficiency] = looks[name];
    const page = await (await browser.newContext({ viewport, colorScheme })).newPage();
    await page.goto(`http://${http}/jobs/simulation`);
    await page.waitForTimeout(900);
    if (deficiency) await (await page.context().newCDPSession(page)).send('Emulation.setEmulatedVisionDeficiency', { type: deficiency });
    const path = `../../web/static/${story}-${tasks}-${name}.png`;
    await page.screenshot({ path });
    execFileSync('pngquant', ['--force', '--skip-if-larger', '--strip', '--quality', '50-90', '--output', path, '128', path]);
    await page.context().close();
    console.log(path);
  }
  simulation.kill('SIGINT');
  await new Promise((done) => { simulation.on('exit', done); });
};
for (const story of chosen.length ? chosen : Object.keys(stories)) {
  const [seconds, sizes] = stories[story];
  await Promise.all(Object.entries(sizes).map(([tasks, names]) => take(story, tasks, seconds, names)));
}
await browser.close();
