#!/usr/bin/env python3
# legible.py FILE.svg…: names each title below 12 pixels, each text that leaves its picture, if letters are
# as wide as Helvetica's, and each picture that does not follow the page's theme.
import re
import sys
import xml.etree.ElementTree as tree

SVG = '{http://www.w3.org/2000/svg}'


def width(text):  # in units of the height
    return sum(0.26 if c in "ijl.,:;|'" else 0.31 if c in 'ftr()-/ ' else 0.83 if c in 'mwMW' else
               0.68 if c.isupper() else 0.55 for c in text)


for file in sys.argv[1:]:
    root = tree.parse(file).getroot()
    style = ''.join(s.text for s in root.iter(SVG + 'style'))
    page = [r for r in root.iter(SVG + 'rect') if r.get('fill') in ('#fff', 'white')]
    if page or not re.search(r'\(prefers-color-scheme:dark\)\{[^@]*\btext\b[^@]*\{fill:', style):
        print(f'{file}: stays light on a dark page')
    sizes = dict(re.findall(r'\.(\w+)\{[^}]*font-size:([\d.]+)px', style))
    right = float(root.get('viewBox').split()[2])
    for text in root.iter(SVG + 'text'):
        said = re.search(r'font-size:([\d.]+)', text.get('style', ''))
        size = (said[1] if said else
                text.get('font-size') or sizes.get(text.get('class')) or root.get('font-size'))
        words = ''.join(text.itertext())
        wide = float(size) * width(words)
        anchor = text.get('text-anchor', 'start')
        begin = float(text.get('x')) - (wide if anchor == 'end' else wide / 2 if anchor == 'middle' else 0)
        if text.get('class') == 'title' and float(size) < 12:
            print(f'{file}: {size} px: {words}')
        if not text.get('transform') and (begin < -2 or begin + wide > right + 2):
            print(f'{file}: from {begin:.0f} to {begin + wide:.0f} of {right:.0f} px: {words}')
