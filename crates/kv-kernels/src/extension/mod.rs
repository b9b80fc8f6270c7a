//! The backend extension: one method an op, in a trait a family of them, implemented for the CPU
//! (`flex`) by the references and for CubeCL devices (`gpu`) by the kernels. Public functions
//! validate first; an implementation may rely on shapes, dtypes and devices.

mod attention;
#[cfg(feature = "cuda")]
mod hopper;
mod layers;
mod merging;
mod sketch;
mod slots;
mod subset;

pub(crate) use attention::{AttentionOps, Eviction};
#[cfg(feature = "cuda")]
pub(crate) use hopper::HopperOps;
pub(crate) use layers::{
    Drawn, Epilogue, EpilogueConfig, LayerOps, Places, Projection, SampleTensors, Written,
};
pub(crate) use merging::{Classes, MergeOps, MergedPools, Merges, MergingPools, StepMerges, Walk};
pub(crate) use sketch::{
    Revised, Revision, SketchAttended, SketchOps, SketchTensors, SketchTokens,
};
pub(crate) use slots::{Drops, Lists, SCALARS, Scalars, SlotOps, SlotPools};
pub(crate) use subset::{LabelTensors, Retrieval, SubsetOps};
