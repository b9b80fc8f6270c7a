//! The extension's methods on the CPU: the references, on the tensors' own buffers.

mod attention;
mod buffers;
mod layers;
mod merging;
mod sketch;
mod slots;
mod subset;
