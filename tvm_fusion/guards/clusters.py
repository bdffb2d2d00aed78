"""Where blocks run: clusters that reach each other's shared memory, and room that spreads blocks evenly."""

from __future__ import annotations

import numpy as np

from ..devices import DeviceSpec, capability

#: Least compute capability times ten with clusters of blocks, and blocks of a cluster that every such chip takes.
_CLUSTERS_FROM, _MOST_BLOCKS = 90, 8

#: Multiprocessors of a group that the blocks of a cluster share, and those of a chip for each whole group (an H200 has
#: 132, and room for 15 clusters of 8 blocks, 30 of 4 and 39 of 3, with one block a multiprocessor).
_GROUP, _SPACING = 16, 17.5

#: Bytes of shared memory that the driver keeps for itself in each block.
_RESERVED = 1024


def most_blocks(device: DeviceSpec) -> int:
    """Blocks of a cluster that a device takes; 1 where it has no clusters."""
    return _MOST_BLOCKS if capability(device.arch) >= _CLUSTERS_FROM else 1


def reached(device: DeviceSpec, resident: np.ndarray | int, blocks: np.ndarray | int) -> np.ndarray:
    """Multiprocessors that clusters of so many blocks keep busy; all where clusters are single blocks.

    The blocks of a cluster share a group of multiprocessors, and what is left over in a group stays idle. Some groups
    have more multiprocessors than others, so that about half of what is left over is room after all.

    Parameters
    ----------
    device : DeviceSpec
        The device.
    resident : int or array of int
        Blocks that are on a multiprocessor together.
    blocks : int or array of int
        Blocks of a cluster.
    """
    room = _GROUP * resident / blocks
    clusters = np.floor(device.multiprocessors / _SPACING * (np.floor(room) + room) / 2)
    busy = np.maximum(1.0, clusters * blocks / resident)
    return np.where(blocks > 1, busy, device.multiprocessors)


def spread_bytes(device: DeviceSpec, needed: int, blocks: int, cluster: int, few: int) -> int:
    """Shared memory that a block asks for: so much that blocks spread evenly over the multiprocessors.

    Kernels that overlap with their predecessor start where there is room. Were there room for more blocks than a
    multiprocessor's share, the first ones to be free would take several, and the kernel would wait for them (measured
    on an H200: 9.9 instead of 6.1 microseconds for a convolution of one block a multiprocessor).

    Parameters
    ----------
    device : DeviceSpec
        The device.
    needed : int
        Bytes that the block uses.
    blocks, cluster : int
        Blocks of the kernel, and of a cluster.
    few : int
        Blocks of a multiprocessor's share up to which it is worth it.
    """
    share = -(-blocks // int(reached(device, 1, cluster)))
    if share > few:
        return needed
    crowded = device.shared_memory_per_multiprocessor // (share + 1) - _RESERVED + 128
    return max(needed, min(crowded, device.shared_memory_per_block_optin))
