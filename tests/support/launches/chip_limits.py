"""How many blocks of a kernel a multiprocessor holds at once, by what each block takes of it."""

from __future__ import annotations

from dataclasses import dataclass

_REGISTERS = 65536
"""32-bit registers of a multiprocessor, on all chips here."""
_REGISTERS_AT_ONCE = 256
"""A warp is given registers in units of this many."""
_WARPS_AT_ONCE = 4
_WARP = 32
_SHARED_RESERVED = 1024
"""Bytes of shared memory that the system takes of each block."""
_SHARED_AT_ONCE = 128


@dataclass(frozen=True)
class ChipLimits:
    """What a multiprocessor of one compute capability has."""

    capability: int
    """As 90 for 9.0."""
    shared_bytes: int
    """Of all blocks together, what the system takes included."""
    shared_bytes_a_block: int
    warps: int
    blocks: int


CHIPS = {
    80: ChipLimits(80, 164 * 1024, 163 * 1024, 64, 32),
    86: ChipLimits(86, 100 * 1024, 99 * 1024, 48, 16),
    89: ChipLimits(89, 100 * 1024, 99 * 1024, 48, 24),
    90: ChipLimits(90, 228 * 1024, 227 * 1024, 64, 32),
    100: ChipLimits(100, 228 * 1024, 227 * 1024, 64, 32),
    120: ChipLimits(120, 100 * 1024, 99 * 1024, 48, 24),
}
"""A100; RTX 30 and A10; RTX 40 and L4; H100 and H200; B200; RTX 50."""


def blocks_at_once(chip: ChipLimits, registers: int, shared_bytes: int, warps: int) -> int:
    """Blocks of `warps` warps with `registers` a thread and `shared_bytes` each that run on one multiprocessor at a
    time; 0: not even one fits."""
    a_warp = max(_up(registers * _WARP, _REGISTERS_AT_ONCE), _REGISTERS_AT_ONCE)
    by_registers = _REGISTERS // a_warp // _WARPS_AT_ONCE * _WARPS_AT_ONCE // _up(warps, _WARPS_AT_ONCE)
    by_shared = chip.shared_bytes // _up(shared_bytes + _SHARED_RESERVED, _SHARED_AT_ONCE)
    if shared_bytes > chip.shared_bytes_a_block:
        return 0
    return min(by_registers, by_shared, chip.warps // warps, chip.blocks)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
