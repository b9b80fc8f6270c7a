//! The largest allocation of a thread, to see that none follows a claim of a file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Watched;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

fn note(size: usize) {
    // A thread that ends may allocate after its locals are gone.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The bytes of the largest allocation that `run` makes on this thread, and its result.
pub(crate) fn largest<T>(run: impl FnOnce() -> T) -> (usize, T) {
    LARGEST.set(0);
    let result = run();
    (LARGEST.get(), result)
}

#[test]
fn a_large_allocation_is_seen() {
    let (bytes, kept) = largest(|| vec![1_u8; 3_000_000]);
    assert!(bytes >= kept.len());
}
