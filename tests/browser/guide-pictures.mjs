// Takes the pictures of the guide page "Find the sick host" into web/static: node guide-pictures.mjs MUSTER [TASKS...]
// It simulates the story dead-host at each size, waits until the host is dead, and makes each picture small with pngquant.
import { execFileSync, spawn } from 'node:child_process';
import { chromium } from 'playwright-core';

const [muster, ...sizes] = process.argv.slice(2);
const [wide, narrow] = [{ width: 1200, height: 820 }, { width: 390, height: 820 }];
const taken = {
  8: [4, [['light', wide, 'light']]],
  256: [32, [['light', wide, 'light'], ['dark', wide, 'dark'], ['narrow', narrow, 'light']]],
  1000: [125, [['grey', wide, 'light', 'achromatopsia']]],
  10000: [1250, [['light', wide, 'light']]],
};
const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });
const browser = await chromium.launch({ executablePath: process.env.MUSTER_CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox', '--force-color-profile=srgb'] });
for (const tasks of sizes.length ? sizes : Object.keys(taken)) {
  const [hosts, pictures] = taken[tasks];
  const http = `127.0.0.1:${20000 + Number(tasks)}`;
  const simulation = spawn(muster, ['simulate', '--story', 'dead-host', '--tasks', tasks, '--hosts', hosts, '--http', http, '--grpc', '127.0.0.1:0'], { stdio: 'ignore' });
  // The host dies after ten seconds; the others then wait for its tasks.
  await pause(45000);
  for (const [name, viewport, colorScheme, deficiency] of pictures) {
    const page = await (await browser.newContext({ viewport, colorScheme })).newPage();
    await page.goto(`http://${http}/jobs/simulation`);
    await page.waitForTimeout(900);
    if (deficiency) await (await page.context().newCDPSession(page)).send('Emulation.setEmulatedVisionDeficiency', { type: deficiency });
    const path = `../../web/static/sick-host-${tasks}-${name}.png`;
    await page.screenshot({ path });
    execFileSync('pngquant', ['--force', '--skip-if-larger', '--strip', '--quality', '50-90', '--output', path, '128', path]);
    await page.context().close();
    console.log(path);
  }
  simulation.kill('SIGINT');
  await pause(1000);
}
await browser.close();
