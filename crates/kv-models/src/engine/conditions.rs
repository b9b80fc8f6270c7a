//! What must hold before an engine serves jobs.

use burn::tensor::Device;
use kv_core::{device_name, is_cpu};
use kv_kernels::free_memory;
use kv_parallel::ParallelError;

use super::EngineOptions;
use super::job::JobError;
use super::script::Script;
use crate::{Model, ModelError};

/// Checks that all ranks run one model by equal options.
pub(super) fn check_alike(
    model: &Model,
    options: &EngineOptions,
    script: &Script,
) -> Result<(), JobError> {
    let EngineOptions { rows, queue, bytes, groups, prefill_share, .. } = options;
    let EngineOptions { prefix_bytes, context_bytes, contexts, .. } = options;
    let own = [
        ("model", model.name().to_string()),
        ("shape", format!("{:?}", model.config())),
        ("dtype", format!("{:?}", model.llama().dtype())),
        ("rows", rows.to_string()),
        ("queue", queue.to_string()),
        ("bytes of caches", bytes.to_string()),
        ("groups", groups.to_string()),
        ("share of prompts", prefill_share.to_string()),
        ("bytes of prefixes", prefix_bytes.to_string()),
        ("bytes of contexts", context_bytes.to_string()),
        ("folder of contexts", contexts.is_some().to_string()),
    ];
    let told = || own.iter().map(|(_, value)| value.clone()).collect::<Vec<_>>();
    let first = script.choose(told).map_err(ModelError::from)?;
    let mut pairs = own.into_iter().zip(first);
    let unlike = pairs.find(|((_, own), first)| own != first);
    let all = script.agree(unlike.is_none()).map_err(ModelError::from)?;
    let error = match unlike {
        None if all => return Ok(()),
        None => ParallelError::Uneven { action: "run the first rank's model by its options" },
        Some(((what, actual), expected)) => {
            let rank = model.llama().ranks().shard().rank();
            ParallelError::Unlike { rank, what, actual, expected }
        }
    };
    Err(ModelError::from(error).into())
}

/// Checks that the device has the memory that an engine was given. A group takes its part at its
/// first job: without this check, that job would be the first to learn of a lack.
///
/// On a CPU a lack is only told. The system hands out memory page by page, when a page is first
/// written, and a cache that is never full never writes all of its pages.
pub(super) fn check_memory(device: &Device, options: &EngineOptions) -> Result<(), JobError> {
    let EngineOptions { bytes, prefix_bytes, context_bytes, .. } = options;
    let needed = bytes.saturating_add(*prefix_bytes).saturating_add(*context_bytes);
    let Some(free) = free_memory(device).filter(|&free| free < needed) else { return Ok(()) };
    let lack = JobError::NoMemory { needed, free, device: device_name(device) };
    if is_cpu(device) {
        tracing::warn!("{lack}");
        return Ok(());
    }
    Err(lack)
}
