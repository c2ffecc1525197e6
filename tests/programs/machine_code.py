#!/usr/bin/env python3
"""machine_code.py OBJECT [KERNEL]: the order in which kernels of an H100 multiply, wait and compute.

For each kernel in the cubins of an object that nvcc has compiled, with KERNEL in its mangled name: its
instructions in a row, a letter for each of those that matter here, as ptxas has ordered them:

    g  a product of a warpgroup    0 1  a wait for all of its products, for all but the last group
    e  special function            r  red to memory   l s  load, store   b  branch   |  barrier
"""
import re
import struct
import sys

LETTERS = {0x308: 'e', 0x9a6: 'r', 0x981: 'l', 0x986: 's', 0x947: 'b', 0xb1d: '|',
           0x9f0: 'g', 0xdf0: 'g', 0x9f3: 'g', 0xdf3: 'g'}
WAIT, IS_WAIT = 0x9c5, 1 << 47


def kernels(cubin):
    """name, instructions (two words each) of the sections .text.NAME of an ELF file."""
    table, = struct.unpack_from('<Q', cubin, 40)
    size, count, names = struct.unpack_from('<HHH', cubin, 58)
    sections = [struct.unpack_from('<IIQQQQ', cubin, table + i * size) for i in range(count)]
    for name, _, _, _, at, length in sections:
        name = cubin[sections[names][4] + name:].split(b'\0', 1)[0].decode()
        if name.startswith('.text.'):
            words = struct.unpack_from('<%dQ' % (length // 8), cubin, at)
            yield name[len('.text.'):], zip(words[::2], words[1::2])


def letter(low, high):
    if low & 0xfff == WAIT:
        return str(high >> 8 & 63) if low & IS_WAIT else ''
    return LETTERS.get(low & 0xfff, '')


with open(sys.argv[1], 'rb') as file:
    data = file.read()
for start in (m.start() for m in re.finditer(b'\x7fELF', data)):
    if struct.unpack_from('<H', data, start + 18)[0] == 190:  # EM_CUDA
        for name, code in kernels(data[start:]):
            if len(sys.argv) < 3 or sys.argv[2] in name:
                print(name, ''.join(letter(*words) for words in code))
