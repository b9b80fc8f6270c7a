//! One file a method: its parameters and the one step that its paper adds.

mod expected_attention;
mod h2o;
mod keydiff;
mod knorm;
mod lagkv;
mod r_kv;
pub(crate) mod random;
mod recent_attention;
mod snapkv;
mod streaming_llm;
mod tova;
mod vatp;

pub use expected_attention::ExpectedAttention;
pub use h2o::H2o;
pub use keydiff::KeyDiff;
pub use knorm::KNorm;
pub use lagkv::LagKv;
pub use r_kv::RKv;
pub use random::Random;
pub(crate) use random::generator;
pub use recent_attention::RecentAttention;
pub use snapkv::SnapKv;
pub use streaming_llm::StreamingLlm;
pub use tova::Tova;
pub use vatp::Vatp;
