//! Tensors that follow from layouts alone. Layers of equal layout share them: most policies keep
//! as many slots of every layer, and a row that joins then launches few kernels a layer.

use std::collections::HashMap;

use burn::tensor::{Int, Tensor};
use kv_kernels::SlotRanges;

use crate::{Result, SlotLayout};

/// Tensors that were made for layers so far, by the numbers that they follow from. Valid on one
/// device.
#[derive(Debug, Default)]
pub(crate) struct LayoutTensors {
    ranges: HashMap<Vec<usize>, SlotRanges>,
    lists: HashMap<Vec<usize>, [Tensor<1, Int>; 2]>,
}

impl LayoutTensors {
    /// A layout's offsets and lengths, `[B, Hkv]`.
    pub(super) fn ranges(
        &mut self,
        layout: &SlotLayout,
        make: impl FnOnce() -> SlotRanges,
    ) -> SlotRanges {
        let key = [layout.offsets(), layout.lengths()].concat();
        self.ranges.entry(key).or_insert_with(make).clone()
    }

    /// Slots of one pool, and where they go in another one, which follow from `key`.
    pub(super) fn lists(
        &mut self,
        key: Vec<usize>,
        make: impl FnOnce() -> Result<[Tensor<1, Int>; 2]>,
    ) -> Result<[Tensor<1, Int>; 2]> {
        if let Some(lists) = self.lists.get(&key) {
            return Ok(lists.clone());
        }
        let lists = make()?;
        self.lists.insert(key, lists.clone());
        Ok(lists)
    }
}
