// Tooltips, linked highlights, keys and zoom; the page is complete without it.
'use strict';
(() => {
  document.body.classList.remove('no-script');
  const root = document.documentElement.style;
  const scroll = document.querySelector('.scroll');
  const tip = document.getElementById('tip');
  const total = Number(document.querySelector('.track').dataset.totalS);
  const headings = [...document.querySelectorAll('#calls th')].map((cell) => cell.textContent);
  const linked = (target) => document.querySelectorAll(`a[href="#${target}"], #${target}`);
  let zoom = 1;
  let shown = null;

  function details(target) {
    const list = document.createElement('dl');
    const row = document.getElementById(target);
    [...row.cells].forEach((cell, index) => {
      if (!cell.textContent || cell.textContent === '-') return;
      for (const [tag, text] of [['dt', headings[index]], ['dd', cell.textContent]]) {
        const part = document.createElement(tag);
        part.textContent = text;
        list.append(part);
      }
    });
    return list;
  }

  function show(link) {
    hide();
    const target = link.hash.slice(1);
    const title = document.createElement('b');
    title.textContent = link.getAttribute('aria-label') || link.textContent;
    tip.replaceChildren(title);
    if (link.dataset.more) tip.append(link.dataset.more);
    if (target) {
      tip.append(details(target));
      linked(target).forEach((part) => part.classList.add('on'));
    }
    shown = link;
    tip.hidden = false;
    place(link.getBoundingClientRect());
  }

  function place(box) {
    const left = Math.max(box.left, scroll.contains(shown) ? scroll.getBoundingClientRect().left : 0);
    const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, below ? box.bottom + 8 : box.top - tip.offsetHeight - 8)}px`;
  }

  function hide() {
    if (shown && shown.hash) linked(shown.hash.slice(1)).forEach((p) => p.classList.remove('on'));
    shown = null;
    tip.hidden = true;
  }

  const linkOf = (event) => event.target.closest('.call, .pausing, .node[href]');
  document.addEventListener('mouseover', (event) => { const a = linkOf(event); if (a) show(a); });
  document.addEventListener('mouseout', (event) => { if (linkOf(event)) hide(); });
  document.addEventListener('focusin', (event) => { const a = linkOf(event); if (a) show(a); });
  document.addEventListener('focusout', hide);
  document.addEventListener('click', (event) => {
    const link = linkOf(event);
    if (!link) return;
    event.preventDefault();
    link.focus();
    show(link);
  });

  function ticks() {
    const room = document.querySelector('.track').clientWidth / 90;
    const rough = total / Math.max(1, room);
    const unit = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough) || 1;
    const marks = [];
    for (let at = 0; at <= total && marks.length < 2000; at += step) {
      const mark = document.createElement('div');
      mark.className = 'tick';
      mark.style.left = `${(100 * at) / total}%`;
      mark.textContent = step < 1 ? `${+(at * 1000).toFixed(3)} ms` : `${+at.toFixed(3)} s`;
      marks.push(mark);
    }
    document.querySelector('.ticks').replaceChildren(...marks);
  }

  function zoomTo(wanted, clientX) {
    const track = document.querySelector('.track');
    const box = track.getBoundingClientRect();
    const labels = document.querySelector('.labels').offsetWidth;
    const middle = scroll.getBoundingClientRect().left + labels + (scroll.clientWidth - labels) / 2;
    const x = clientX === undefined ? middle : clientX;
    const share = (x - box.left) / box.width;
    zoom = Math.min(400, Math.max(1, wanted));
    root.setProperty('--zoom', zoom);
    scroll.scrollLeft += track.getBoundingClientRect().left + share * track.offsetWidth - x;
    ticks();
  }

  document.getElementById('in').onclick = () => zoomTo(zoom * 1.6);
  document.getElementById('out').onclick = () => zoomTo(zoom / 1.6);
  document.getElementById('all').onclick = () => zoomTo(1);
  scroll.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomTo(zoom * Math.exp(-event.deltaY / 300), event.clientX);
  }, { passive: false });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') hide();
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === '+' || event.key === '=') zoomTo(zoom * 1.6);
    if (event.key === '-') zoomTo(zoom / 1.6);
    if (event.key === '0') zoomTo(1);
    const link = linkOf(event);
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!link || !move) return;
    const all = [...document.querySelectorAll(link.matches('.node') ? '.node[href]' : '.call, .pausing')];
    const next = all[all.indexOf(link) + move];
    if (next) { event.preventDefault(); next.focus(); }
  });
  addEventListener('resize', ticks);
  ticks();
})();
