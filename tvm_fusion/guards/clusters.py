"""Clusters: neighbouring thread blocks that run together and reach each other's shared memory."""

from __future__ import annotations

import numpy as np

from ..devices import DeviceSpec, capability

#: Least compute capability times ten with clusters of blocks, and blocks of a cluster that every such chip takes.
_CLUSTERS_FROM, _MOST_BLOCKS = 90, 8

#: Multiprocessors of a group that the blocks of a cluster share, and those of a chip for each whole group (an H200 has
#: 132, and room for 15 clusters of 8 blocks, 30 of 4 and 39 of 3, with one block a multiprocessor).
_GROUP, _SPACING = 16, 17.5


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
