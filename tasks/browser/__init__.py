"""Pages in a real browser as environments: Chromium under Playwright, MiniWoB++ and pages of our own.

sites.py          which pages there are, and how a page is begun and judged
chromium.py       Chromium in a process of its own
pool.py           several of them: pages are opened, acted on and given back; what hangs or dies is replaced
actions.py        what a model may do, in the words of its prompt, and the reading of it
environment.py    one episode as `mmrl.Environment`
task.py           the task `browser`: rows that name a page and a seed
"""
