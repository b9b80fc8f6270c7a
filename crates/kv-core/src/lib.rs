#![doc = include_str!("../README.md")]
//!
//! Dimension letters: `B` batch, `Hkv` key-value heads, `T` tokens, `C` capacity in slots, `S`
//! slots of a pool, `D` head dim.

mod allocation;
mod budget;
mod cache;
mod counted;
mod device;
mod error;
mod host;
mod layer;
mod layout;
mod memory;
mod ranking;
mod selection;
mod store;
mod tensors;

pub use allocation::{HeadAllocation, LayerAllocation, apportion};
pub use budget::Budget;
pub use cache::{KvCache, Mirror, Origin};
pub use counted::counted;
pub use device::{DeviceChoice, available_devices, device_name, is_cpu, select_device};
pub use error::Error;
pub use host::{HostCache, HostLayer};
pub use layer::state::{
    HostState, LoadState, PolicyState, SavedState, StateBytes, StepLengths, state_of, states_of,
};
pub use layer::{
    CacheOptions, FullRange, Fullness, LayerCache, LeavingSlots, NUMERATORS, Room, expect_shape,
};
pub use layout::SlotLayout;
pub use memory::MemoryReport;
pub use ranking::{rank, top};
pub use selection::Selection;
pub use tensors::{packed, read_f32, read_i32, zero_rows};

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
