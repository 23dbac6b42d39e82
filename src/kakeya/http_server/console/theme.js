/* Light or dark, before the first paint: the system's choice, unless this browser was told otherwise. */
(() => {
  const STORED = 'kakeya-theme';
  const root = document.documentElement;
  const system = window.matchMedia('(prefers-color-scheme: dark)');

  function chosen() {
    const stored = localStorage.getItem(STORED);
    return stored === 'dark' || stored === 'light' ? stored : null;
  }

  function apply() {
    root.dataset.theme = chosen() ?? (system.matches ? 'dark' : 'light');
    const button = document.getElementById('theme-button');
    if (button) button.textContent = root.dataset.theme === 'dark' ? 'Light' : 'Dark';
  }

  function toggle() {
    const next = root.dataset.theme === 'dark' ? 'light' : 'dark';
    if (next === (system.matches ? 'dark' : 'light')) localStorage.removeItem(STORED);
    else localStorage.setItem(STORED, next);
    apply();
  }

  apply();
  system.addEventListener('change', apply);
  document.addEventListener('DOMContentLoaded', () => {
    apply();
    document.getElementById('theme-button').addEventListener('click', toggle);
  });
})();
