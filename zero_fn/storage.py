"""How whole tensors lie in files: torch.distributed.checkpoint, told of boxes by two planners.

A rank writes the boxes that it holds, each of them once over all ranks, and reads what overlaps the
boxes that it wants.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as read_boxes
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict as write_boxes

from .pipelining.staging import Look
from .regions import Box, Whole
from .tree import Tensor

_ALONE = "torch.distributed is disabled"  # that one process saves alone is meant


def write(path: Path, wholes: dict[str, Whole], *, alone: bool, group: Any = None) -> None:
    """Write the boxes of all ranks; they are on the disk when it returns.

    The public function warns where one process saves alone, and a thread cannot silence a warning
    for itself only: hence torch's own below it.
    """
    writer = FileSystemWriter(path)
    write_boxes(wholes, writer, process_group=group, no_dist=alone, planner=_Writes())


def read(path: Path, wholes: dict[str, Whole], *, alone: bool) -> None:
    """Fill the boxes of each rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        read_boxes(wholes, storage_reader=FileSystemReader(path), planner=_Reads(), no_dist=alone)


def read_index(path: Path) -> tuple[dict[str, Look], list[str]]:
    """How each saved tensor looks, and what is missing of the files, a line each."""
    metadata = FileSystemReader(path).read_metadata()
    looks = {}
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            dtype = saved.properties.dtype
            looks[name] = Look(tuple(saved.size), dtype, torch.device("cpu"))
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
    lines = []
    for name, end in ends.items():
        if not (path / name).exists():
            lines.append(f"the file {name} is missing")
        elif (path / name).stat().st_size < end:
            size = (path / name).stat().st_size
            lines.append(f"the file {name} has {size} bytes and should have {end}")
    return looks, lines


class _Writes(DefaultSavePlanner):
    """The boxes of each whole tensor; those that several ranks hold are written by one."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, whole in self.state_dict.items():
            for box in whole.boxes:
                data = TensorWriteData(
                    _chunk(box), TensorProperties(whole.dtype), torch.Size(whole.shape)
                )
                index = MetadataIndex(name, torch.Size(box.offsets))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        boxes = self.state_dict[index.fqn].boxes
        (local,) = [box.local for box in boxes if box.offsets == tuple(index.offset or ())]
        return local.detach()


class _Reads(LoadPlanner):
    """What fills the boxes of each whole tensor."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.wholes, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, whole in self.wholes.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            if 0 not in whole.shape:
                chunks = [_chunk(box) for box in whole.boxes]
                items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise AssertionError("a checkpoint has no bytes items")

    def resolve_tensor(self, read_item: Any) -> Tensor:
        local = self.wholes[read_item.dest_index.fqn].boxes[read_item.dest_index.index].local
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            local = local.narrow(dim, start, length)
        return local

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        pass


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
