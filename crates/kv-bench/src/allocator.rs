//! The system's allocator, told to keep memory that a run on a CPU has freed.

/// Lets glibc keep freed memory for the next allocation, whatever its size. Elsewhere nothing
/// changes.
///
/// A pass over a prompt allocates and frees buffers of megabytes, layer after layer. By default
/// glibc maps each of them anew, and the system clears every page at its first use: 22 % of the
/// time of a pass over 1,000 tokens of SmolLM2.
pub(crate) fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the calls change parameters of the allocator, which it reads at later allocations.
    // Unknown parameters are ignored.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}
